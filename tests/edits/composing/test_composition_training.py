"""Training what was composed: what is frozen keeps every bit, the rest moves, and a stopped run goes on."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from braidlm.core.models.folders import load_config, load_lineage, load_model
from braidlm.data.packing.prepare import prepare
from braidlm.edits.compose import compose
from braidlm.training.train import train
from tests.edits.composed_paths import GPT2, RECIPE, TOKENIZER, saved_path

CASES = {
    "paths": (["paths"], "shared_linear", 1),
    "paths, without blocks": (["paths"], "shared_linear", 0),
    "joins": (["joins"], "gumbel_v1", 1),
    "embedding": (["embedding"], "add", 0),
    "nothing": ([], "shared_linear", 0),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def trained(start: Path, packed, out: Path, steps: int = 4, **changes):
    recipe = {key: value for key, value in RECIPE.items() if key != "model"}
    recipe |= {"name": "both", "out": str(out), "start_from": str(start), "data": {"length": 32, "sets": packed}}
    return train({**recipe, "training": {**RECIPE["training"], "budget": f"{steps} steps"}, **changes}, device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_keeps_every_bit(case, runs, packed, tmp_path):
    freeze, join, blocks = CASES[case]
    start = compose(runs, tmp_path / "made", join=join, blocks=blocks, freeze=freeze)
    before, after = weights(start), weights(trained(start, packed, tmp_path / "run").model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    origin = load_lineage(start)["tensors"]
    fresh = {name for name in before if origin[name] == "fresh"}
    expected = {
        "paths": fresh,
        "paths, without blocks": fresh,
        "joins": {n for n in before if ".join." not in n and not n.startswith(("model.stages.1.", "model.norm."))},
        "embedding": set(before) - {"model.embedding.weight"},
        "nothing": set(before),
    }[case]
    assert moved == expected
    if case == "paths, without blocks":
        assert {name for name in moved if ".join." not in name} == {"model.stages.0.linear.weight", "model.norm.weight"}


def test_learned_positions_are_frozen_with_the_paths(packed, tmp_path):
    prepare("stories", tmp_path / "data", documents=40, tokenizer="bytes", workers=1)
    folders = [saved_path(tmp_path / name, i, **GPT2) for i, name in enumerate("ab")]
    start = compose(folders, tmp_path / "made", freeze=["paths"])
    assert load_config(start).frozen == ["paths", "embedding", "head"]
    run = trained(start, {"data": {"path": str(tmp_path / "data"), "holdout": 0.05}}, tmp_path / "run", steps=2)
    before, after = weights(start), weights(run.model)
    origin = load_lineage(start)["tensors"]
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if origin[name] != "fresh"
    }
    assert load_config(run.model).frozen == ["paths", "embedding", "head"]
    assert TOKENIZER.vocab_size == load_config(start).vocab_size


def test_a_run_with_frozen_parts_goes_on_where_it_was(runs, packed, tmp_path):
    start = compose(runs, tmp_path / "made", freeze=["paths"], join="gumbel_v2")
    whole = trained(start, packed, tmp_path / "whole", steps=6)
    first = trained(start, packed, tmp_path / "parted", steps=6)
    # As after a crash that lost the last checkpoint.
    for folder in ("checkpoints", "states"):
        last = max((tmp_path / "parted" / folder).iterdir(), key=lambda path: path.name)
        assert last.name == first.model.name
        for file in sorted(last.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        last.rmdir()
    again = trained(start, packed, tmp_path / "parted", steps=6)
    assert again.progress.steps == 6
    for name, tensor in weights(whole.model).items():
        assert torch.equal(tensor, weights(again.model)[name]), name


def test_a_frozen_tied_head_is_frozen_by_either_name(tmp_path):
    folders = [saved_path(tmp_path / name, i) for i, name in enumerate("ab")]
    for part in ("embedding", "head"):
        model = load_model(compose(folders, tmp_path / part, freeze=[part]))
        assert model.config.frozen == ["embedding", "head"]
        assert not model.head.weight.requires_grad
        assert not model.model.embedding.weight.requires_grad
        assert model.model.stages[0].layers[0].attention.qkv.weight.requires_grad


def test_the_lineage_of_the_trained_model_leads_back(runs, packed, tmp_path):
    start = compose(runs, tmp_path / "made")
    lineage = load_lineage(trained(start, packed, tmp_path / "run", steps=1).model)
    assert [source["sha256"] for source in lineage["sources"] if "model" in source] == [
        load_lineage(start)["weights"]["sha256"]
    ]
    assert [source["recipe_sha256"] for source in load_lineage(start)["sources"]] == [
        load_lineage(max((run / "checkpoints").iterdir()))["recipe_sha256"] for run in runs
    ]
