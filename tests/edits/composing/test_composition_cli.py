"""`braid compose` end to end, on paths that were trained."""

from pathlib import Path

import pytest

import braidlm
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_config, load_lineage, load_model
from braidlm.inspection.layers import find_layers
from braidlm.training.train import train
from tests.edits.composed_paths import EXPERTS, JOINS, saved_path


@pytest.fixture
def braid(capsys):
    """Runs a command in this process; the exit code, what was shown and what went wrong."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["compose", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_two_runs_become_a_model_that_trains(braid, runs, packed, tmp_path):
    out = tmp_path / "both"
    code, said, errors = braid(
        *runs, "--out", out, "--join", "{kind: gumbel_v1, losses: {load_balance: 0.01}}", "--verbose"
    )
    assert (code, errors) == (0, "")
    assert said.splitlines()[0] == "Compose stories + maths: width 32, join gumbel_v1"
    assert "2      model.stages.2.layers.*.stack.*.attention.qkv.weight" in said
    assert "stories, maths: model.stages.*.layers.*.attention.qkv.weight" in said
    assert "left out: the path's norm before its own head" in said
    assert f"`braid train RECIPE start_from={out}`" in said
    assert said.splitlines()[-1] == str(out)
    assert sum(line.endswith(str(out)) for line in said.splitlines()) == 1
    assert load_config(out).architecture["stages"][2]["parallel"]["join"]["losses"] == {"load_balance": 0.01}
    recipe = {
        "name": "both",
        "out": str(tmp_path / "run"),
        "start_from": str(out),
        "data": {"length": 32, "sets": packed},
        "training": {"budget": "2 steps", "batch": 4},
        "log": {"every": 1},
    }
    assert train(recipe, device="cpu").finished
    assert '"usage"' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "second", [{}, {"width": 24}, {"width": 24, **EXPERTS}], ids=["alike", "wider", "wider, with experts"]
)
@pytest.mark.parametrize("join", JOINS)
def test_what_comes_next_can_be_done(braid, tmp_path, join, second):
    """`braid routes` is named where it can show something."""
    paths = [saved_path(tmp_path / "a", 0), saved_path(tmp_path / "b", 1, **second)]
    code, said, _ = braid(*paths, "--out", tmp_path / "both", "--join", join)
    assert code == 0
    model = load_model(tmp_path / "both")
    if "braid routes" in said:
        assert any(layer.read_by for layer in find_layers(model))
    else:
        assert "Then `braid eval RUN` measures it." in said
        with pytest.raises(BraidError, match="which path is taken cannot be read"):
            find_layers(model)


def test_a_dry_run(braid, runs, tmp_path):
    code, said, errors = braid(*runs, "--dry-run", "--blocks", 0, "--freeze", "paths", "--quiet")
    assert (code, errors) == (0, "")
    assert "Compose stories + maths" in said
    assert "parameters   20,512, 20,512 active for a token" in said
    assert "trained      2,080 (10%)" in said
    assert "memory       weights 0.1 MB, in training with AdamW 0.1 MB" in said
    assert "training will leave as they are: paths, embedding, head" in said
    assert list(tmp_path.iterdir()) == []


def test_quiet_shows_the_folder_alone(braid, runs, tmp_path):
    out = tmp_path / "both"
    words = ("--names", "tales", "sums", "--layers", 1, "--seed", 4, "--freeze", "joins", "embedding", "--quiet")
    assert braid(*runs, "--out", out, *words) == (0, f"{out}\n", "")
    assert [source["name"] for source in load_lineage(out)["sources"]] == ["tales", "sums"]
    assert load_lineage(out)["options"]["seed"] == 4
    assert load_config(out).frozen == ["joins", "embedding", "head"]  # the head is the embedding


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--join", "{kind: gumbel_v1"], "--join {kind: gumbel_v1: this is neither a kind of join nor a mapping"),
        (["--join", "[1]"], "join: expected a join name or a mapping"),
        (["--join", "gumbel"], "unknown join 'gumbel'. Did you mean 'gumbel_v"),
        (["--freeze", "everything"], "'everything' cannot be frozen. There are: blocks, embedding, head,"),
    ],
)
def test_wrong_words(braid, runs, tmp_path, words, text):
    code, said, errors = braid(*runs, "--out", tmp_path / "both", *words)
    assert (code, said) == (2, "")
    assert text in errors
    assert list(tmp_path.iterdir()) == []


def test_the_verb_is_a_function_of_the_package():
    from braidlm.edits.compose import compose

    assert braidlm.compose is compose
    assert Path(compose.__code__.co_filename).name == "compose.py"
