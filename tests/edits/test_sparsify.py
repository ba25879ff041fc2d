"""Magnitude pruning: which weights become zero, and which stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.edits.edit import edit
from braidlm.edits.sparsify import two_of_four, without_smallest
from tests.edits.small_models import KINDS, model_folder, text_file


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.floats(0, 0.99))
@settings(max_examples=40, deadline=None)
def test_what_stays_is_larger_than_what_goes(seed: int, outputs: int, fours: int, share: float) -> None:
    rows = torch.randn(2, outputs, 4 * fours, generator=torch.Generator().manual_seed(seed))
    for sparse in (without_smallest(rows, share), two_of_four(rows)):
        kept = sparse != 0
        assert torch.equal(sparse[kept], rows[kept])
    sparse = without_smallest(rows, share)
    for member, own in zip(rows, sparse, strict=True):
        gone = own == 0
        assert gone.sum() == int(share * member.numel())
        if gone.any():
            assert member[gone].abs().max() <= member[~gone].abs().min()
    groups, kept = rows.unflatten(-1, (-1, 4)), two_of_four(rows).unflatten(-1, (-1, 4)) != 0
    assert (kept.sum(-1) == 2).all()
    smallest_kept = groups.abs().masked_fill(~kept, torch.inf).amin(-1)
    assert (groups.abs().masked_fill(kept, 0).amax(-1) <= smallest_kept).all()


@pytest.mark.parametrize("options", [{"share": 0.3}, {"pattern": "2:4"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_only_linear_layers_outside_routers_change(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    source = model_folder(tmp_path / "source", **KINDS[kind])
    edit("sparsify", source, tmp_path / "out", **options)
    before, after = load_model(source).state_dict(), load_model(tmp_path / "out").state_dict()
    assert list(before) == list(after)
    for name, tensor in after.items():
        is_matrix = name.startswith("model.stages.") and name.endswith(".weight") and "norm" not in name
        zeros = (tensor == 0).float().mean().item()
        if is_matrix and ".router" not in name:
            assert zeros == pytest.approx(0.5 if "pattern" in options else 0.3, abs=0.02), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_it_is_measured_and_recorded(tmp_path: Path) -> None:
    edit("sparsify", model_folder(tmp_path / "source"), tmp_path / "out", share=0.5, text=str(text_file(tmp_path)))
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    assert lineage["measured"]["before"]["weights_bytes"] == lineage["measured"]["after"]["weights_bytes"]
    assert lineage["tensors"]["model.stages.0.layers.0.feed.out.weight"]["how"] == "the smallest 50.0% become zero"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a share of the weights or a pattern"),
        ({"share": 0.5, "pattern": "2:4"}, "either a share of the weights or a pattern"),
        ({"share": 1.0}, "below 1"),
        ({"pattern": "1:4"}, "is not one of 2:4"),
        ({"share": 0.5, "text": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match=message):
        edit("sparsify", model_folder(tmp_path / "source"), tmp_path / "out", **options)


def test_a_matrix_without_fours_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "source", block={"feed": {"kind": "mlp", "hidden": 6}})
    edit("sparsify", source, tmp_path / "out", pattern="2:4", dry_run=True)
    assert "2 matrices stay: 4 does not divide their inputs" in capsys.readouterr().out
