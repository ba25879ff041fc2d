"""GLUE's tasks as `braid eval` sees them: found in a data folder, named when they are not, in one table."""

from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.evaluate import evaluate
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.data_sets import DATA_SETS
from braidlm.evals.task_data import find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import SUITES
from braidlm.opening.opened_model import OpenedModel
from tests.evals.labelled_examples import answerable, write_answerable, write_rows

BABYLM = ("superglue_boolq", "glue_mnli", "glue_mrpc", "superglue_multirc", "glue_qqp", "glue_rte", "superglue_wsc")


def test_every_data_set_is_a_task() -> None:
    for of in DATA_SETS:
        task = TASKS[of.task]
        assert task.metric == f"{of.metric}, %"
        assert task.description.endswith("(after fine-tuning)")
        assert all((task.size, task.licence, task.locations, task.fetch))
    assert {task for task in TASKS if "glue_" in task} == {of.task for of in DATA_SETS}


def test_the_challenges_seven_are_a_suite() -> None:
    assert SUITES["glue_babylm"] == BABYLM


@pytest.mark.parametrize("folder", ["babylm-2025/full_eval/glue_filtered", "glue-2024/glue_filtered"])
def test_data_is_found_where_its_training_file_is(tmp_path: Path, folder: str) -> None:
    write_answerable(tmp_path / folder)
    assert find_data(["glue_sst2"], tmp_path, {}) == {"glue_sst2": tmp_path / folder / "sst2.train.jsonl"}


def test_another_layout_is_found_too(tmp_path: Path) -> None:
    folder = tmp_path / "glue-extra" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("fine\t1\ndull\t0\n")
    (folder / "dev.tsv").write_text("fine\t1\n")
    path = find_data(["glue_sst2"], tmp_path, {})["glue_sst2"]
    assert TASKS["glue_sst2"]().open(path).count == 1


def test_missing_examples_say_which_files_to_get(tmp_path: Path) -> None:
    row = {"question": "is it", "passage": "It is.", "label": 1}
    write_rows(tmp_path / "babylm-2025" / "full_eval" / "glue_filtered" / "boolq.valid.jsonl", [row])
    with pytest.raises(BraidError) as caught:
        find_data(["superglue_boolq", "glue_qnli"], tmp_path, {})
    assert (
        "It is boolq.train.jsonl and boolq.valid.jsonl of `full_eval/glue_filtered` of the BabyLM 2025"
        in caught.value.what
    )
    assert "It is train.tsv and dev.tsv of GLUE (https://gluebenchmark.com/tasks)" in caught.value.what


def test_a_wrong_label_is_an_error_before_a_model_is_looked_for(tmp_path: Path) -> None:
    folder = write_answerable(tmp_path / "data")
    write_rows(folder / "sst2.valid.jsonl", [*answerable(5, seed=0), {"sentence": "so so", "label": 3}])
    with pytest.raises(BraidError, match="the label 3 is none of those of sst2") as caught:
        evaluate(tmp_path / "no model", "glue_sst2", data_of={"glue_sst2": folder})
    assert caught.value.where == f"{folder / 'sst2.valid.jsonl'}, line 6"


def test_wrong_settings_are_an_error_before_a_model_is_loaded(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedModel, "load", lambda *_: pytest.fail("a model was loaded"))
    path = {"glue_sst2": write_answerable(tmp_path / "data")}
    with pytest.raises(BraidError, match="seeds: expected a whole number from 1 to 1000, got 0"):
        evaluate(runs / "one", "glue_sst2", data_of=path, settings=Settings(seeds=0))


def test_the_score_stands_in_the_table(tmp_path: Path, runs: Path) -> None:
    folder = write_answerable(tmp_path / "data", train=32, valid=10)
    found = evaluate(runs / "one", "glue_sst2", data_of={"glue_sst2": folder}, out=tmp_path / "out", device="cpu")
    result = found.models[0].tasks["glue_sst2"]
    assert 0 <= result.score <= 100
    assert result.count == 10
    assert result.chance == pytest.approx(60.0)
    assert result.notes["epochs"] == [10]
    again = evaluate(runs / "one", "glue_sst2", data_of={"glue_sst2": folder}, out=tmp_path / "out", device="cpu")
    assert again.models[0].tasks["glue_sst2"].notes == result.notes
