"""One, two and four processes train the same: after 20 steps losses, norms and weights are equal to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from braidlm.core.errors import BraidError
from braidlm.training.step.parallel import Rank
from braidlm.training.step.sharding import Layout, ParallelConfig, alone_with_parameters, choose_layout
from tests.tiny_decoders import save_decoder, save_gates
from tests.training.step.processes import Case, run_all, trained

HERE = Rank(0, 1, torch.device("cpu"))
MICRO_BATCHES = 8
"""In all processes together: two in each of four, so that gradients are accumulated."""
EXPERTS: dict[str, Any] = {"names": 4, "router": {"top_k": 2, "compute": "sparse"}}
ROUTED = {"block": {"attention": {"heads": 4}, "feed": {"kind": "swiglu", "hidden": 24, "experts": EXPERTS}}}
PATHS = {"stages": ["block", {"parallel": {"layers": 2, "paths": ["a", "b"]}}]}
SHARED = {"stages": [{"block": {"layers": 3, "share": "blocks"}}], "tie_embeddings": True}
MUON = {"optimizer": {"kind": "muon", "lr": 0.02}}
CASES = {
    "dense": Case(),
    "copies": Case(parallel="replicated"),
    "shared": Case(SHARED, {"activation_checkpointing": True}),
    "paths-muon": Case(PATHS, {**MUON, "average": {"kind": "ema", "rate": 0.9}}),
    "experts": Case(ROUTED, {"losses": [{"early_exit": {"weights": "equal"}}]}),
    "experts-muon": Case(ROUTED, MUON),
}


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
    run_all(cases, world, tmp_path, MICRO_BATCHES)
    for name, expected in alone.items():
        found = load_file(tmp_path / f"{name}-{world}.safetensors")
        assert set(found) == set(expected)
        assert expected["losses"][-1, 0] < expected["losses"][0, 0], "it learns"
        for key, tensor in expected.items():
            torch.testing.assert_close(
                found[key], tensor, atol=2e-4, rtol=1e-4, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
            )
