"""One, two and four processes train the same: after a few steps losses, norms and weights are equal to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from braidlm.core.errors import BraidError
from braidlm.training.step.layout import Layout, ParallelConfig, alone_with_parameters, choose_layout
from braidlm.training.step.parallel import Rank
from tests.tiny_decoders import save_decoder, save_gates
from tests.training.step.processes import Case, run_all, trained

HERE = Rank(0, 1, torch.device("cpu"))
MICRO_BATCHES = 8
"""In all processes together: two in each of four, so that gradients are accumulated."""
EXPERTS: dict[str, Any] = {"names": 4, "router": {"top_k": 2, "compute": "sparse"}}
ROUTED = {"block": {"attention": {"heads": 4}, "feed": {"kind": "swiglu", "hidden": 24, "experts": EXPERTS}}}
HEADS = {
    "block": {
        "attention": {"heads": 2, "experts": {**EXPERTS, "keys": "shared"}},
        "feed": {"kind": "mlp", "hidden": 24, "bias": True, "experts": EXPERTS},
    }
}
PATHS = {"stages": ["block", {"parallel": {"layers": 2, "paths": ["a", "b"]}}]}
SHARED = {"stages": [{"block": {"layers": 3, "share": "blocks"}}], "tie_embeddings": True}
MUON = {"optimizer": {"kind": "muon", "lr": 0.02}}
CASES = {
    "dense": Case(),
    "copies": Case(parallel="replicated"),
    "shared": Case(SHARED, {"activation_checkpointing": True}),
    "paths-muon": Case(PATHS, {**MUON, "average": {"kind": "ema", "rate": 0.9}}),
    "experts": Case(ROUTED, {"losses": [{"early_exit": {"weights": "equal"}}]}),
    "experts-spread": Case(ROUTED, parallel={"weights": "sharded", "experts": 2}),
    "experts-copied": Case(HEADS, MUON, parallel={"weights": "replicated", "experts": 2}),
}


FOR_TWO = ("dense", "experts-copied")
"""A launch of two adds little to one of four but where two processes share all experts."""


@pytest.fixture(scope="module")
def cases(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("decoder")
    base = save_decoder("llama", stories / "tokenizer", folder / "base")
    return {**CASES, "gated": Case(decoder=save_gates(base, folder / "gates", moved=0.1))}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: trained(case, HERE, MICRO_BATCHES)[0] for name, case in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_equal_one(world: int, cases: dict[str, Case], alone: dict[str, Any], tmp_path: Path) -> None:
    run = cases if world == 4 else {name: cases[name] for name in FOR_TWO}
    run_all(run, world, tmp_path, MICRO_BATCHES)
    for name in run:
        expected = alone[name]
        found = load_file(tmp_path / f"{name}-{world}.safetensors")
        assert set(found) == set(expected)
        assert expected["losses"][-1, 0] < expected["losses"][0, 0], "it learns"
        for key, tensor in expected.items():
            torch.testing.assert_close(
                found[key], tensor, atol=2e-4, rtol=1e-4, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
            )


@pytest.mark.parametrize(
    ("weights", "processes", "here", "expected"),
    [
        ("auto", 1, 1, None),
        ("sharded", 1, 1, Layout(1, 1)),
        ("replicated", 8, 8, Layout(8, 1)),
        ("sharded", 64, 8, Layout(1, 64)),
        ("hybrid", 64, 8, Layout(8, 8)),
        ("hybrid", 8, 8, Layout(1, 8)),
    ],
)
def test_where_weights_lie(
    weights: Any, processes: int, here: int, expected: Layout | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr("braidlm.training.step.layout.broadcast", lambda value, _: value)
    rank = Rank(0, processes, torch.device("cpu"))
    assert choose_layout(ParallelConfig(weights), nn.Linear(2, 2), rank) == expected


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(10_000, Layout(64, 1)), (300, Layout(8, 8)), (30, Layout(1, 64))],
    ids=["it fits", "it fits into a machine", "it needs all"],
)
def test_auto_takes_what_leaves_memory(memory: int, expected: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("braidlm.training.step.layout.broadcast", lambda value, _: value)
    monkeypatch.setattr("braidlm.training.step.layout.free_memory", lambda _: 8 * memory)
    layer = nn.Linear(8, 8, bias=False)  # 1,024 bytes with gradients and moments
    assert choose_layout(ParallelConfig(), layer, Rank(0, 64, torch.device("cpu"))) == expected


@pytest.mark.parametrize(("layout", "number"), [((4, 1, 3), 4), ((1, 8, 3), 8), ((2, 2, 4), 2)])
def test_experts_divide_the_processes(layout: tuple[int, int, int], number: int) -> None:
    with pytest.raises(BraidError, match=f"Give a number that divides {number}"):
        Layout(*layout)


def test_experts_need_processes() -> None:
    with pytest.raises(BraidError, match="2 processes are to share experts, and there is one"):
        choose_layout(ParallelConfig(experts=2), nn.Linear(2, 2), HERE)


def test_layers_that_share_weights_are_gathered_together() -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    stage = nn.ModuleList([a, b, c])
    assert alone_with_parameters([a, b, c, stage, nn.Identity()]) == [c, stage]
    assert alone_with_parameters([c, stage, a]) == [c, stage], "what is around has taken the rest"
