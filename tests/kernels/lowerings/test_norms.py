"""A kernel for another package's norm is one file: a lowering that says the norm's form, or computes rows by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.lowerings import lowering
from braidlm.kernels.lowerings.lowering import lowers
from braidlm.kernels.lowerings.norms import NormForm, NormLowering
from braidlm.model.errors import BraidError
from braidlm.model.norms import norms
from braidlm.model.routing.dispatch import Groups
from tests.kernels.comparison import TOLERANCES, assert_close, side_stream
from tests.kernels.whole_models import plain_stream, results
from tests.tiny_models import random_ids, tiny_model

EXPERTS: dict[str, Any] = {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"stages": [{"block": {"layers": 2}}]},
    "experts": {"stages": [{"block": {"layers": 2}}], "feed": {"kind": "mlp", "hidden": 24, "experts": EXPERTS}},
    "routed paths": {"stages": [{"parallel": {"paths": 3, "layers": 2, "join": {"kind": "routed", "top_k": 2}}}]},
}


class UnitNorm(nn.Module):
    """Root mean square without a scale: every fused kernel knows it, by its form."""

    stackable = True

    @dataclass
    class Config:
        eps: float = 1e-5

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__()
        self.config, self.width = config, width

    def forward(self, hidden: Tensor, groups: Groups | None = None) -> Tensor:
        return F.rms_norm(hidden, (self.width,), eps=self.config.eps)


class MeanNorm(UnitNorm):
    """Over the mean absolute value, which no fused kernel knows."""

    def forward(self, hidden: Tensor, groups: Groups | None = None) -> Tensor:
        return hidden / (hidden.abs().mean(-1, keepdim=True) + self.config.eps)


@triton.jit
def _mean_norm(x, out, scales, width, eps, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    scale = 1.0 / (tl.sum(tl.abs(values), 0) / width + eps)
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, (values * scale).to(out.dtype.element_ty), mask=column < width)


class MeanNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, eps: float) -> Tensor:
        out, scales = torch.empty_like(rows), rows.new_empty(len(rows), 1, dtype=torch.float32)
        width = rows.shape[1]
        _mean_norm[(len(rows),)](rows, out, scales, width, eps, triton.next_power_of_2(width))
        ctx.save_for_backward(rows, scales)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        rows, scales = ctx.saved_tensors
        projection = (upstream * rows).sum(-1, keepdim=True) * scales.square() / rows.shape[1]
        return (upstream * scales - projection * rows.sign()).to(rows.dtype), None


class UnitNormLowering(NormLowering):
    honours = {"eps"}

    def form(self, norm: UnitNorm) -> NormForm:
        return NormForm(norm.config.eps, centred=False)


class MeanNormLowering(NormLowering):
    honours = {"eps"}

    def normalise(self, norm: MeanNorm, rows: Tensor) -> Tensor:
        return MeanNormFunction.apply(rows, norm.config.eps)


@pytest.fixture(autouse=True)
def _toy_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(norms, "parts", {**norms.parts, "unit": UnitNorm, "mean": MeanNorm})
    monkeypatch.setattr(lowering, "LOWERINGS", dict(lowering.LOWERINGS))
    yield
    lowering._load_third_party_lowerings.cache_clear()


def toy_model(name: str, norm: str, device: str) -> Any:
    options = dict(MODELS[name])
    feed = {"feed": options.pop("feed")} if "feed" in options else {}
    block = {"norm": norm, "attention": {"heads": 1}, **feed}
    return tiny_model(positions="learned", norm=norm, block=block, **options).to(device).train()


@pytest.mark.parametrize("norm", ["unit", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_a_norm_of_another_package_by_its_own_lowering(name: str, norm: str, device: str) -> None:
    """A form joins every fused kernel; without one the norm runs alone, and paths that would fold it in are plain."""
    lowers(UnitNorm)(UnitNormLowering)
    lowers(MeanNorm)(MeanNormLowering)
    model, side = toy_model(name, norm, device), side_stream(device)
    lowered, ids = LoweredModel(model, side), random_ids(2, 7).to(device)
    reasons = set(lowered.lowered.refusals.values())
    unfolded = {"its norm cannot be folded into the product behind it"}
    assert reasons == (unfolded if (name, norm) == ("routed paths", "mean") else set())
    weights = torch.randn(2, 7, model.model.width_out, device=device)
    actual = results(model, lowered.stream, ids, weights, torch.float32, side)
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
    assert actual.keys() == plain.keys()
    for what, expected in plain.items():
        assert_close(actual[what], expected.double(), 8 * TOLERANCES[torch.float32], what)


class EntryPoint:
    name, value = "toy", "toy_norms"

    def __init__(self, works: bool):
        self.works = works

    def load(self) -> None:
        if not self.works:
            raise ModuleNotFoundError("No module named 'toy_norms'")
        lowers(UnitNorm)(UnitNormLowering)


@pytest.mark.parametrize("works", [True, False])
def test_a_lowering_is_found_as_parts_are(works: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    lowering._load_third_party_lowerings.cache_clear()
    monkeypatch.setattr(lowering, "entry_points", lambda group: [EntryPoint(works)] * (group == "braidlm.lowerings"))
    model = toy_model("dense", "unit", device)
    if works:
        assert not LoweredModel(model).lowered.refusals
    else:
        with pytest.raises(BraidError, match="lowerings of another package"):
            LoweredModel(model)


def test_without_a_lowering_only_what_the_norm_is_before_is_plain(device: str) -> None:
    refusals = LoweredModel(toy_model("dense", "unit", device)).lowered.refusals
    assert set(refusals.values()) == {"norm: UnitNorm has no kernels", "UnitNorm has no kernels"}
