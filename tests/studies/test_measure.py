"""Scores of a study: each model's once, as soon as it is there, and anew where the model or the text has changed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.models.runs import is_run
from braidlm.studies import running
from braidlm.studies.decoding import decode_study
from braidlm.studies.measure import Scorer
from braidlm.studies.report import study
from braidlm.studies.running import SCORES
from tests.studies.toy_study import DENSE, PATH_MODEL, path, toy_study

STEPS: dict[str, Any] = {**DENSE, "small": {"model": PATH_MODEL}}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the models that are scored."""
    found: list[Path] = []

    def measured(scorer: Scorer, folder: Path, names: list[str]) -> dict[str, Any]:
        found.append(folder)
        return its_own(scorer, folder, names)

    its_own = Scorer._measured
    monkeypatch.setattr(Scorer, "_measured", measured)
    return found


def test_a_stopped_study_keeps_the_scores_that_it_has(
    tmp_path: Path, scored: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=STEPS))

    def stopped(recipe: dict[str, Any], *args: Any) -> Any:
        if "small" in recipe["name"]:
            raise KeyboardInterrupt
        return train(recipe, *args)

    train = running.train_to_end
    with monkeypatch.context() as patch:
        patch.setattr(running, "train_to_end", stopped)
        with pytest.raises(KeyboardInterrupt):
            study(plan, device="cpu")
    kept = json.loads((tmp_path / "out" / SCORES / "dense-seed-1.json").read_text())
    assert kept["name"] == "dense"
    results = study(plan, device="cpu")
    assert [folder.parents[1].name for folder in scored] == ["dense", "small"], "each once"
    assert kept["found"]["bits"] == results.of("dense")[0].bits
    assert kept["found"]["parameters"] == results.of("dense")[0].parameters


def test_what_has_changed_is_scored_anew(tmp_path: Path, scored: list[Path]) -> None:
    data = toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE)
    first = study(decode_study(data), device="cpu").models[0]
    plan = decode_study(data)
    study(replace(plan, validation=replace(plan.validation, tokens=100)), device="cpu")
    assert len(scored) == 2, "less of the text"
    study(plan, device="cpu")
    assert len(scored) == 3, "all of it again, since the latest scores are kept"
    data["training"]["optimizer"]["lr"] = 1e-4
    other = study(decode_study(data), device="cpu", fresh=True).models[0]
    assert len(scored) == 4
    assert other.bits != first.bits


def test_what_a_composed_model_is_without_a_path_is_kept_too(tmp_path: Path, scored: list[Path]) -> None:
    steps = {name: path(name, epochs=0.1) for name in ("stories", "maths")}
    plan = toy_study(tmp_path / "out", tmp_path / "data", steps={**steps, "both": {"compose": ["stories", "maths"]}})
    (both,) = study(decode_study(plan), device="cpu").of("both")
    assert not is_run(both.folder)
    assert set(both.silenced) == {"stories", "maths"}
    count = len(scored)
    again = study(decode_study(plan), device="cpu").of("both")[0]
    assert len(scored) == count
    assert (again.silenced, again.bits) == (both.silenced, both.bits)


def test_a_fresh_study_that_is_stopped_has_no_report_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE))
    study(plan, device="cpu")
    (tmp_path / "out" / "notes.txt").write_text("mine")

    def stopped(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train_to_end", stopped)
    with pytest.raises(KeyboardInterrupt):
        study(plan, device="cpu", fresh=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} - {"seed-1"} == {"notes.txt"}


def test_text_of_the_same_length_is_other_text(tmp_path: Path, scored: list[Path]) -> None:
    text = tmp_path / "held out.txt"
    domains = {"stories": {"source": "stories", "documents": 60, "validation": str(text)}}
    plan = toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE, domains=domains)
    bits = []
    for words in ("A cat sees a dog.", "A dog sees a cat."):
        text.write_text(words)
        bits.append(study(decode_study(plan), device="cpu").models[0].bits)
    assert len(scored) == 2
    assert bits[0] != bits[1]


def test_a_damaged_file_of_scores_is_written_anew(tmp_path: Path, scored: list[Path]) -> None:
    plan = decode_study(toy_study(tmp_path / "out", tmp_path / "data", steps=DENSE))
    (first,) = study(plan, device="cpu").models
    file = tmp_path / "out" / SCORES / "dense-seed-1.json"
    file.write_text(file.read_text()[:40])
    (again,) = study(plan, device="cpu").models
    assert len(scored) == 2
    assert again.bits == first.bits == json.loads(file.read_text())["found"]["bits"]
