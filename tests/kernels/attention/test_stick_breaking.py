"""Stick-breaking attention by kernels against torch's operations in float64: outputs, what is left, gradients."""

from dataclasses import dataclass

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.attention import stick_breaking_wide
from braidlm.kernels.attention.stick_breaking import StickBreaking, plain_stick_breaking
from braidlm.kernels.attention.stick_breaking_tiles import Tiles
from braidlm.kernels.attention.stick_breaking_wide import WideStickBreaking
from tests.kernels.comparison import nan_in_new_memory
from tests.reference import REFERENCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCH = {"num_warps": 4, "num_stages": 1}
SMALL = Tiles(16, 16, 2, LAUNCH, LAUNCH, LAUNCH)


@dataclass(frozen=True)
class Case:
    """Shapes and options; `shift` moves all scores, so that sticks are long or short."""

    time: int
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    current: bool = True
    shift: float = 0.0

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        query = torch.randn(2, self.time, self.heads, self.dim, device=DEVICE)
        key, value = (torch.randn(2, self.time, self.kv_heads, self.dim, device=DEVICE) for _ in range(2))
        query[..., 0], key[..., 0] = abs(self.shift) ** 0.5, abs(self.shift) ** 0.5 * (1 if self.shift > 0 else -1)
        return [x.to(dtype).requires_grad_() for x in (query, key, value)]


CASES = {
    "one token": Case(1),
    "one token that does not see itself": Case(1, current=False),
    "17 tokens": Case(17),
    "33 tokens that do not see themselves": Case(33, current=False),
    "heads that share keys": Case(24, heads=4, kv_heads=2),
    "heads whose size is no power of two": Case(20, dim=24),
    "sticks that are gone after a few keys": Case(80, shift=120.0),
    "sticks that hardly break": Case(80, shift=-60.0),
}


def compare(actual: tuple[Tensor, Tensor], inputs: list[Tensor], case: Case, tolerance: float) -> None:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain_stick_breaking(*exact, case.dim**-0.5, case.current)
    torch.manual_seed(1)
    upstream = [torch.randn_like(x) for x in actual]
    gradients = torch.autograd.grad(actual, inputs, upstream)
    references = torch.autograd.grad(expected, exact, [x.double() for x in upstream])
    for name, x, y in zip(
        ("output", "left", "query", "key", "value"), (*actual, *gradients), (*expected, *references), strict=True
    ):
        error = (x.double() - y).abs().max().item()
        assert error <= tolerance * max(1.0, y.abs().max().item()), (name, error)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiles_equal_the_plain_operations(case: Case) -> None:
    inputs = case.inputs(torch.float32)
    with nan_in_new_memory():
        output = StickBreaking.apply(*inputs, case.dim**-0.5, case.current, SMALL)
        compare(output, inputs, case, 1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_wide_heads_equal_the_plain_operations(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stick_breaking_wide, "CHUNK", 16)
    inputs = case.inputs(torch.float32)
    with nan_in_new_memory():
        output = WideStickBreaking.apply(*inputs, case.dim**-0.5, case.current)
        compare(output, inputs, case, 1e-5)


@pytest.mark.gpu  # the interpreter has no products in bf16
@pytest.mark.parametrize("function", [StickBreaking, WideStickBreaking])
def test_low_precision_is_as_exact_as_its_rounding(function: type[torch.autograd.Function]) -> None:
    case = Case(33, heads=4, kv_heads=2)
    inputs = case.inputs(torch.bfloat16)
    compare(function.apply(*inputs, case.dim**-0.5, case.current), inputs, case, 2e-2)


def test_rows_may_be_slices_of_one_product() -> None:
    case = Case(17)
    whole = torch.cat([x.detach() for x in case.inputs(torch.float32)], dim=-1)
    slices = [x.requires_grad_() for x in whole.flatten(2).unflatten(2, (6, 16)).split(2, dim=2)]
    compare(StickBreaking.apply(*slices, case.dim**-0.5, True, SMALL), slices, case, 1e-5)


def test_the_reference_code_agrees() -> None:
    from safetensors.torch import load_file

    tensors = {name: x.to(DEVICE) for name, x in load_file(REFERENCE / "stick-breaking.safetensors").items()}
    inputs = [tensors[name].contiguous() for name in ("q", "k", "v")]
    plain, _ = plain_stick_breaking(*inputs, inputs[0].shape[-1] ** -0.5)
    output, _ = StickBreaking.apply(*inputs, inputs[0].shape[-1] ** -0.5, True, SMALL)
    for actual in (plain, output):
        torch.testing.assert_close(actual, tensors["out"], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 17, 512, 2048, 4096])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_real_sizes_on_the_device(length: int, dim: int) -> None:
    case = Case(length, heads=2, kv_heads=1, dim=dim)
    inputs = case.inputs(torch.bfloat16)
    compare(StickBreaking.apply(*inputs, dim**-0.5, True), inputs, case, 2e-2)


@pytest.mark.gpu
def test_wide_heads_on_the_device() -> None:
    case = Case(700, heads=2, kv_heads=1, dim=1024)
    inputs = case.inputs(torch.bfloat16)
    compare(WideStickBreaking.apply(*inputs, 1 / 32, True), inputs, case, 2e-2)
