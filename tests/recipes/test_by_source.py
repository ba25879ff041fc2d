"""`best/by-source`: every side is shown the same words, and at toy size it runs from text to the report."""

import csv
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import load_study
from tests.recipes.source_files import write_sources

RECIPE = "best/by-source"
SOURCES = ["childes", "stories", "talk", "wiki", "books"]


def toy(folder: Path) -> list[str]:
    """Overrides that leave everything of the recipe but its sizes, its task and two of its five seeds."""
    changes = [*write_sources(RECIPE, folder), f"out={folder / 'out'}", f"data.cache={folder / 'cache'}", "tasks=null"]
    changes += ["data.length=32", "data.tokenizer.vocab_size=400", "data.chunking.stride=8", "training.batch=4"]
    changes += ["training.lengths=[{until: 0.7, length: 8}]"]
    changes += ["seeds=[1,2]", "steps.dense.seeds=[1]", "training.warmup=2", "validation.tokens=300"]
    changes += ["epochs=0.2", "steps.fifth.train.epochs=0.04", "steps.mixture.train.warmup=1", "kept=0.8"]
    return [*changes, "models.dense.width=16", "models.dense.stages[0].block.layers=1"]


def test_every_side_is_shown_the_same_words() -> None:
    study = load_study(RECIPE)
    assert {study.epochs_of(name) for name in (*SOURCES, "mixture")} == {study.epochs}
    assert len(study.seeds_of("fifth")) * study.epochs_of("fifth") == pytest.approx(study.epochs)
    assert study.steps["by_source"].reads == list(study.domains) == SOURCES
    assert len(study.seeds_of("fifth")) == len(SOURCES)


def test_the_settings_are_those_of_the_averages() -> None:
    ours, best, pair = (encode(load_study(f"best/{name}")) for name in ("by-source", "average", "strict-small"))
    assert ours["training"] == {**best["training"], "warmup": ours["training"]["warmup"]}
    assert ours["data"]["tokenizer"] == best["data"]["tokenizer"]
    assert ours["models"]["dense"] == pair["models"]["dense"]


@pytest.mark.slow
def test_from_text_to_the_report(tmp_path: Path) -> None:
    assert main(["train", RECIPE, *toy(tmp_path), "--device", "cpu"]) == 0
    bits, costs = ((tmp_path / f"out/tables/{name}.csv").read_text() for name in ("bits-per-byte", "cost"))
    rows = {row["model"]: row for row in csv.DictReader(bits.splitlines())}
    words = {row["model"]: row["words"] for row in csv.DictReader(costs.splitlines())}
    assert list(rows) == [*SOURCES, "mixture", "fifth", "dense", "by_source", "by_seed"]
    assert {name: row["seeds"] for name, row in rows.items() if row["seeds"] != "1"} == {"fifth": "2"}
    assert words["mixture"].count("+") == 1, "what its members were shown, and what it was"
    silent = (tmp_path / "out/tables/silent-paths.csv").read_text()
    assert all(f"mixture,{source}" in silent for source in SOURCES)
    assert (tmp_path / "out/report.html").is_file()
