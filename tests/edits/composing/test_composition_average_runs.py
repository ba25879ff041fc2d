"""Averaging from the command line, on models that were trained, and training on from what comes out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.cli.main import main
from braidlm.core.models.folders import load_model
from braidlm.training.train import train


def braid(*words: object) -> int:
    return main([str(word) for word in words])


def trained_on(folder: Path, packed: dict[str, dict[str, Any]], out: Path) -> Any:
    recipe = {
        "name": "on",
        "out": str(out),
        "start_from": str(folder),
        "data": {"length": 32, "sets": packed},
        "training": {"budget": "4 steps", "batch": 4, "optimizer": {"lr": 1e-2}},
        "checkpoints": {"every": "4 steps"},
        "validation": {"every": "4 steps", "tokens": 500},
    }
    return load_model(train(recipe, device="cpu").model)


def test_an_average_is_made_evaluated_and_trained_on(runs, packed, tmp_path, capsys):
    made = tmp_path / "made"
    assert braid("compose", *runs, "--join", "average", "--out", made) == 0
    said = capsys.readouterr().out
    assert "Its probabilities are the models', averaged." in said
    assert said.splitlines()[-1] == str(made)
    text = packed["stories"]["path"]
    options = ("--data", f"bits_per_byte={text}", "--max-tokens", 300, "--out", tmp_path / "scores")
    assert braid("eval", made, "bits_per_byte", *options) == 0
    assert braid("generate", made, "Once", "--max-tokens", 3, "--paths", "stories") == 0
    assert "active paths: stories" in capsys.readouterr().out
    before, after = load_model(made).state_dict(), trained_on(made, packed, tmp_path / "on").state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before), "every model learns"


def test_shares_alone_are_trained(runs, packed, tmp_path):
    made, join = tmp_path / "made", "{kind: mixture, per_token: true}"
    assert braid("compose", *runs, "--join", join, "--freeze", "paths", "--out", made) == 0
    before, after = load_model(made).state_dict(), trained_on(made, packed, tmp_path / "on").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.mixture.bias", "head.mixture.router.weight"}


def test_a_model_is_withdrawn(runs, tmp_path, capsys):
    made, rest = tmp_path / "made", tmp_path / "rest"
    braid("compose", *runs, "--join", "average", "--out", made)
    assert braid("edit", "withdraw", made, "--paths", "maths", "--dry-run") == 0
    assert "Withdraw maths from made: stories stays" in capsys.readouterr().out
    assert braid("edit", "withdraw", made, "--paths", "maths", "--out", rest) == 0
    ids = torch.arange(20)[None]
    with torch.no_grad():
        alone = load_model(made, paths=["stories"])(ids).logits
        torch.testing.assert_close(load_model(rest)(ids).logits.log_softmax(-1), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("option", [("--blocks", 1), ("--layers", 2), ("--start", "mean")])
def test_a_layout_cannot_be_chosen(runs, tmp_path, capsys, option):
    assert braid("compose", *runs, "--join", "average", *option, "--out", tmp_path / "made") == 2
    assert f"stay as they are: {option[0][2:]} cannot be chosen" in capsys.readouterr().err
