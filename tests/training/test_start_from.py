"""A run that starts from a model prepares text with the model's tokenizer; a conflict is told before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.training.train import train
from tests.training.tiny_runs import tiny_recipe, weights, written


@pytest.fixture(scope="module")
def start(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest model has a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("start") / "run"
    train(tiny_recipe({"stories": stories}, folder, training={"budget": 1}))
    return folder


@pytest.fixture
def recipe(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that starts from it and reads text."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    content = tiny_recipe({}, tmp_path / "here" / "next", start_from=str(start), training={"budget": 1})
    content["data"]["sets"] = {"maths": {"source": "maths", "documents": 40, "holdout": 0.1}}
    del content["model"]
    return written(content, tmp_path)


def test_text_is_prepared_with_the_models_tokenizer(start: Path, recipe: Path, braid: Callable[..., Any]) -> None:
    answer = braid("train", recipe)
    assert answer.code == 0, answer.err
    assert "Training a tokenizer" not in answer.out
    before, after = (run / "checkpoints" / "step-000001" for run in (start, Path("next")))
    assert load_tokenizer(after).fingerprint == load_tokenizer(before).fingerprint
    assert load_model(after).config.vocab_size == 300
    assert weights(after).keys() == weights(before).keys()


def test_show_finds_no_problem_in_it(recipe: Path, braid: Callable[..., Any]) -> None:
    answer = braid("show", recipe)
    assert answer.code == 0, answer.err
    assert "the tokenizer has" not in answer.out + answer.err


CONFLICTS = {
    "a new tokenizer": (
        ["data.tokenizer.vocab_size=400"],
        [
            "asks for a new tokenizer, and the model to start from has its own",
            "Use the model's (`data.tokenizer=null`)",
        ],
    ),
    "a part of an architecture": (
        ["+model.width=64"],
        [
            "model.stages: missing",
            "model: the one to start_from has its own; leave `model` out, or give the whole of it",
        ],
    ),
    "another tokenizer": (
        ["data.tokenizer=bytes"],
        ["the data has another tokenizer than the model to start from: ", "as `source` without data.tokenizer"],
    ),
}


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_a_conflict_is_told_before_anything_is_prepared(
    conflict: str, recipe: Path, tmp_path: Path, braid: Callable[..., Any]
) -> None:
    overrides, texts = CONFLICTS[conflict]
    answer = braid("train", recipe, *overrides)
    assert answer.code == 2
    for text in texts:
        assert text in answer.err
    assert list((tmp_path / "here").iterdir()) == []


def test_naming_the_models_own_tokenizer_is_no_conflict(start: Path, recipe: Path, braid: Callable[..., Any]) -> None:
    answer = braid("train", recipe, f"data.tokenizer={start}/checkpoints/step-000001")
    assert answer.code == 0, answer.err


def test_a_model_without_a_tokenizer_needs_one_to_be_named(
    start: Path, stories: Path, recipe: Path, tmp_path: Path, braid: Callable[..., Any]
) -> None:
    bare = load_model(start / "checkpoints" / "step-000001")
    bare.save_pretrained(tmp_path / "bare")
    answer = braid("train", recipe, f"start_from={tmp_path / 'bare'}")
    assert answer.code == 2
    assert "the model to start from has none that could be used instead" in answer.err
    assert "Name the tokenizer that the model was trained with: data.tokenizer=DIR." in answer.err
    answer = braid("train", recipe, f"start_from={tmp_path / 'bare'}", f"data.tokenizer={stories / 'tokenizer'}")
    assert answer.code == 0, answer.err
