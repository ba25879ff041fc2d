"""One way to name a model: folders, runs, checkpoints, studies."""

import json
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.opening.names import find_model, find_sources, name_sources, short_names, title_of


def made_model(folder: Path, steps: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "braid"}')
    (folder / "lineage.json").write_text(json.dumps({"training": {"steps": steps}}))
    return folder


def made_run(folder: Path, bits: dict[int, float] | None = None) -> Path:
    """A run with a checkpoint every ten steps, validated with these bits per byte."""
    for steps in (10, 20, 30):
        made_model(folder / "checkpoints" / f"step-{steps}", steps)
    made_model(folder / "checkpoints" / ".step-40.part", 40)
    (folder / "recipe.yaml").write_text("name: x\n")
    records = [{"kind": "validation", "step": step, "bits_per_byte": score} for step, score in (bits or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for seed in (1, 2, 10):
        for name in ("dense", "stories"):
            made_run(tmp_path / "study" / f"seed-{seed}" / name)
        made_model(tmp_path / "study" / f"seed-{seed}" / "linear-composed")
    return tmp_path / "study"


def refused(name: Path) -> str:
    with pytest.raises(BraidError) as caught:
        find_model(name)
    return str(caught.value)


def test_a_model_folder_is_itself(tmp_path: Path) -> None:
    model = made_model(tmp_path / "model")
    assert find_model(model) == find_model(str(model)) == model
    assert title_of(model) == "model"


def test_a_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert find_model(run) == run / "checkpoints" / "step-30"
    assert title_of(find_model(run)) == "run"


def test_a_checkpoint_by_its_name(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert find_model(run / "step-10") == find_model(run / "checkpoints" / "step-10")


def test_the_best_checkpoint_has_the_lowest_validated_bits(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: 2.0, 15: 0.5, 20: 1.0, 30: 1.5})
    assert find_model(run / "best") == run / "checkpoints" / "step-20"


def test_a_run_that_was_not_validated_has_no_best(tmp_path: Path) -> None:
    assert "no checkpoint of this run was validated when it was saved" in refused(made_run(tmp_path / "run") / "best")


def test_a_study_stands_for_all_its_models(study: Path) -> None:
    folders = [str(path.relative_to(study)) for path in find_sources(study)]
    assert folders == [f"seed-{seed}/{name}" for seed in (1, 2, 10) for name in ("dense", "stories")]


def test_what_a_study_made_of_its_models_is_among_them(study: Path) -> None:
    """Not the beginning of a run, a step between two edits, or a folder that is being written."""
    for name in ("seed-1/pruned", "seed-1/tuned-1-prune", "seed-1/.part", "average"):
        made_model(study / name)
    folders = [str(path.relative_to(study)) for path in find_sources(study)]
    assert [name for name in folders if name.startswith("seed-1/")] == [
        "seed-1/dense", "seed-1/pruned", "seed-1/stories"
    ]  # fmt: skip
    assert folders[-1] == "average"
    assert find_model(study / "average") == study / "average"
    assert f"Name one of {study}/dense, {study}/pruned, {study}/stories, {study}/average." in refused(study)
    assert all(path.name in ("dense", "stories") for path in find_sources(study, any_folder=True))


def test_one_model_of_a_study_by_name(study: Path) -> None:
    assert find_sources(study / "dense") == [study / "seed-1" / "dense"]
    assert find_model(study / "dense" / "step-10") == study / "seed-1" / "dense" / "checkpoints" / "step-10"
    assert find_sources(study / "seed-2" / "dense") == [study / "seed-2" / "dense"]
    assert find_model(study / "linear-composed") == study / "seed-1" / "linear-composed"


def test_where_one_model_is_needed_a_study_says_its_names(study: Path) -> None:
    assert f"Name one of {study}/dense, {study}/stories." in refused(study)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = made_model(tmp_path / "model")
    assert find_model("~/model") == model


@pytest.mark.parametrize(
    ("name", "near"), [("stuby", "study"), ("study/dence", "study/dense"), ("study/dense/step_10", "step-10")]
)
def test_the_nearest_name_is_suggested(study: Path, name: str, near: str) -> None:
    message = refused(study.parent / name)
    assert "there is no such folder" in message
    assert f"{near}'?" in message


def test_a_folder_that_is_nothing(tmp_path: Path) -> None:
    assert "neither a model folder (no config.json) nor a run folder (no recipe.yaml) nor a study" in refused(tmp_path)
    (tmp_path / "train").mkdir()
    assert f"text to train on, which a recipe reads: data.sets.NAME.folder={tmp_path}" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "a file stands where a folder is expected" in (message := refused(tmp_path / "file"))
    assert "What was exported to one file is for other programs" in message


def test_a_folder_of_runs_says_what_is_in_it(study: Path) -> None:
    made_run(study.parent / "mine")
    assert f"Name one that is in it: {study.parent / 'mine'}, {study}." in refused(study.parent)
    for number in range(9):
        made_run(study.parent / f"more-{number}")
    assert f"{study.parent / 'more-3'} ..." in refused(study.parent)


def test_short_names_are_unique(study: Path, tmp_path: Path) -> None:
    assert list(name_sources([study / "dense", study / "stories"])) == ["dense", "stories"]
    assert list(name_sources(study))[:2] == ["seed-1/dense", "seed-1/stories"]
    assert list(name_sources({"mine": study / "dense"})) == ["mine"]
    assert next(iter(name_sources({"mine": study}))) == "mine/seed-1/dense"
    one = tmp_path / "one" / "checkpoints" / "step-1"
    assert list(short_names([one])) == ["one/step-1"]


def test_a_model_given_twice_is_refused(study: Path) -> None:
    with pytest.raises(BraidError, match="given twice"):
        name_sources([study, study / "dense"])
