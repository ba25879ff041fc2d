"""`braid eval --exits`: the scores of a model after each of its layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import braidlm
from braidlm.core.decoding.early_exits import leave_after
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import read_text
from braidlm.evals.scoring.scorer import Scorer
from tests.outcome import Outcome
from tests.report_pages import charts_of
from tests.tiny_models import tiny_model

NARROW: list[Any] = ["block", {"project": {"to": 8}}, "block", {"project": {"to": 16}}, "block"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exits")
    (root / "dev.txt").write_text("The cat sat on the mat.\n\nA dog ran after the ball.\n")
    for name, stages in {"deep": [{"block": {"layers": 3}}], "narrow": NARROW}.items():
        model = tiny_model(stages=stages, vocab_size=bytes_tokenizer().vocab_size)
        save_model(model, root / name, bytes_tokenizer(), {"made_by": "test"})
    return root


def test_every_point_is_the_score_of_a_model_that_is_left_there(root: Path) -> None:
    curves = braidlm.exit_curve(
        [root / "deep", root / "narrow"], "bits_per_byte", data_of={"bits_per_byte": root / "dev.txt"}, device="cpu"
    )
    assert [(p.curve, p.layer) for p in curves.points] == [
        ("deep", 1), ("deep", 2), ("deep", 3), ("narrow", 1), ("narrow", 3),
    ]  # fmt: skip
    for point in curves.points:
        model = load_model(root / point.curve)
        leave_after(model, point.layer)
        evaluated = EvaluatedModel(Scorer(model), bytes_tokenizer())
        expected = read_text(root / "dev.txt").evaluate("bits_per_byte", evaluated).score
        assert point.scores["bits_per_byte"] == pytest.approx(expected, abs=1e-9)
    whole = braidlm.eval(root / "deep", "bits_per_byte", data_of={"bits_per_byte": root / "dev.txt"}, device="cpu")
    assert curves.points[2].scores["bits_per_byte"] == whole.models[0].tasks["bits_per_byte"].score


def test_the_verb_writes_a_curve(root: Path, tmp_path: Path, eval_verb: Callable[..., Outcome]) -> None:
    arguments = (root / "deep", "bits_per_byte", "--data", f"bits_per_byte={root / 'dev.txt'}", "--out", tmp_path / "o")
    shown = eval_verb(*arguments, "--exits", "--quiet")
    assert (shown.code, shown.err) == (0, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["model", "layer", "bits_per_byte"]
    assert [line[:2] for line in lines[1:4]] == [["deep", "1"], ["deep", "2"], ["deep", "3"]]
    assert {"exits.html", "exits.json", "exits.csv"} <= {path.name for path in (tmp_path / "o").iterdir()}
    assert list(charts_of(tmp_path / "o" / "exits.html")) == ["exits-bits_per_byte"]
    facts = json.loads((tmp_path / "o" / "exits.json").read_text())
    assert [point["layer"] for point in facts["points"]] == [1, 2, 3]
    page = (tmp_path / "o" / "exits.html").read_text()
    assert "left after layer" in page
    assert '<figure class="picture">' in page
    some = eval_verb(*arguments, "--exits", 1, 3, "--json")
    assert [point["layer"] for point in json.loads(some.out)["points"]] == [1, 3]


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("deep", ("--exits", 4), "cannot be left after layer 4"),
        ("narrow", ("--exits", 2), "after layers 1, 3"),
        ("deep", ("--exits", "--all-checkpoints"), "--exits cannot be combined with --all-checkpoints"),
    ],
)
def test_mistakes_are_told(
    root: Path, tmp_path: Path, eval_verb: Callable[..., Outcome], model: str, options: tuple[Any, ...], text: str
) -> None:
    data = f"bits_per_byte={root / 'dev.txt'}"
    shown = eval_verb(root / model, "bits_per_byte", "--data", data, "--out", tmp_path / "o", *options)
    assert shown.code == 2
    assert text in shown.err


def test_models_of_transformers_have_no_exits(root: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=bytes_tokenizer().vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    bytes_tokenizer().save(tmp_path / "gpt2")
    with pytest.raises(BraidError, match="only Braid's models can be left after a layer"):
        braidlm.exit_curve(tmp_path / "gpt2", "bits_per_byte", data_of={"bits_per_byte": root / "dev.txt"})
