"""The data of multiple-choice tasks: both layouts of rows give one question; errors name the line."""

import json
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.tasks import TASKS
from tests.evals.choice_samples import HUB_ROWS, READY_ROWS, Rows

CHOICES = ("arc_easy", "arc_challenge", "winogrande", "piqa", "openbookqa", "boolq")


def written(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def opened(name: str, path: Path, rows: Rows) -> Any:
    return TASKS[name]().open(written(path, rows))


@pytest.mark.parametrize("name", [*READY_ROWS])
def test_prompts_that_are_ready_are_those_that_are_made(name: str, tmp_path: Path) -> None:
    made, ready = (opened(name, tmp_path / "rows.jsonl", rows[name]) for rows in (HUB_ROWS, READY_ROWS))
    if name == "lambada":
        assert made.items == ready.items
        assert made.items[1] == ("One two, one", " two")
    else:
        assert made.items == ready.items
    assert made.sha256 != ready.sha256
    assert made.count == len(HUB_ROWS[name])


def test_the_prompts_themselves(tmp_path: Path) -> None:
    first = {
        name: opened(name, tmp_path / "rows.jsonl", HUB_ROWS[name]).items[0]
        for name in (*CHOICES, "hellaswag", "mmlu", "mmlu_continuation")
    }
    assert first["arc_easy"].options[0] == ("Question: What falls from clouds?\nAnswer:", " rain")
    assert first["winogrande"].options[1] == ("Ann thanked Bea because Bea", " had helped.")
    assert first["hellaswag"].options[1] == ("Baking: How to bake. Heat the oven. Then you", "  fly away.")
    assert first["boolq"].options[1] == ("Cats are animals.\nQuestion: is a cat an animal?\nAnswer:", " yes")
    about = "The following are questions (with answers) about abstract algebra.\n\n"
    assert first["mmlu_continuation"].options[1] == (about + "Question: What is 1 + 1?\nAnswer:", " 2")
    assert first["mmlu"].options[1] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
        " B",
    )


def test_the_headline_is_the_fields(tmp_path: Path) -> None:
    by_length = {"arc_challenge", "hellaswag", "openbookqa"}
    for name in (*CHOICES, "hellaswag", "mmlu"):
        data = opened(name, tmp_path / "rows.jsonl", HUB_ROWS[name])
        assert data.headline == ("per byte" if name in by_length else "raw")
        assert TASKS[name].metric == ("accuracy, % (per byte)" if name in by_length else "accuracy, %")


def test_hellaswag_in_one_file_of_lists(tmp_path: Path) -> None:
    row = {"question": "[header] A scene. he", "choices": {"B": "runs.", "A": "[step] sleeps."}, "answer": "B"}
    file = tmp_path / "hellaswag.json"
    file.write_text(json.dumps({"dataset": "hellaswag", "dev": [row], "test": [row, row]}))
    data = TASKS["hellaswag"]().open(file)
    assert data.count == 3
    assert data.items[0].options == (("A scene. he", "  sleeps."), ("A scene. he", " runs."))
    assert data.items[0].answer == 1
    file.write_text(json.dumps({"test": [row, {**row, "answer": "E"}]}))
    with pytest.raises(BraidError, match="'answer' is to be one of A, B, not \"E\"") as caught:
        TASKS["hellaswag"]().open(file)
    assert caught.value.where == f"{file}, test, item 2"


def test_boolq_says_yes_in_several_ways(tmp_path: Path) -> None:
    row = HUB_ROWS["boolq"][0]
    plain = {key: value for key, value in row.items() if key != "label"}
    rows = [{**row, "label": True}, {**plain, "answer": False}, {**row, "label": "1"}]
    data = opened("boolq", tmp_path / "rows.jsonl", rows)
    assert [question.answer for question in data.items] == [1, 0, 1]
    assert data.fixed_options


def mmlu_folder(root: Path) -> Path:
    for split, answers in (("dev", "BADCB"), ("test", "CA")):
        (root / split).mkdir(parents=True)
        for subject in ("anatomy", "world_religions"):
            lines = [f'"Is {n}, or not?",a,b,c,d,{letter}\n' for n, letter in enumerate(answers)]
            (root / split / f"{subject}_{split}.csv").write_text("".join(lines))
    return root


def test_mmlu_from_csv_files_with_and_without_examples(tmp_path: Path) -> None:
    folder = mmlu_folder(tmp_path)
    plain, shown = (TASKS[name]().open(folder) for name in ("mmlu", "mmlu_5shot"))
    assert [question.of for question in plain.items] == ["anatomy"] * 2 + ["world_religions"] * 2
    assert [question.answer for question in plain.items] == [2, 0, 2, 0]
    prompt = shown.items[2].options[0][0]
    assert prompt.startswith(
        "The following are multiple choice questions (with answers) about world religions.\n\nIs 0,"
    )
    assert "or not?\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\nIs 1, or not?" in prompt
    assert prompt.endswith(
        "Is 4, or not?\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\nIs 0, or not?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )
    assert plain.sha256 != shown.sha256
    assert (plain.fixed_options, TASKS["mmlu_continuation"]().open(folder).fixed_options) == (True, False)


def test_mmlu_says_what_is_missing(tmp_path: Path) -> None:
    folder = mmlu_folder(tmp_path)
    file = folder / "test" / "anatomy_test.csv"
    file.write_text("Is it?,a,b,c,d,A\nIs it?,a,b,c,A\n")
    with pytest.raises(BraidError, match="this line has 5 columns, not 6") as caught:
        TASKS["mmlu"]().open(folder)
    assert caught.value.where == f"{file}, line 2"
    file.write_text("Is it?,a,b,c,d,E\n")
    with pytest.raises(BraidError, match="'answer' is to be one of A, B, C, D, not \"E\""):
        TASKS["mmlu"]().open(folder)
    (folder / "dev" / "anatomy_dev.csv").write_text("Is it?,a,b,c,d,A\n")
    file.write_text("Is it?,a,b,c,d,A\n")
    with pytest.raises(BraidError, match="there are 1 examples of this subject, and 5 are to be shown"):
        TASKS["mmlu_5shot"]().open(folder)
    with pytest.raises(BraidError, match=r"there is no test/SUBJECT_test\.csv and no test\.jsonl here"):
        TASKS["mmlu"]().open(folder / "dev")


WRONG = [
    ("arc_easy", {"answerKey": "E"}, "'answerKey' is to be one of A, B, C, not \"E\""),
    ("arc_easy", {"choices": ["rain"]}, "'choices' is to be an object, not [\"rain\"]"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, "there are 2 options and 3 labels"),
    ("piqa", {"label": 2}, "'label' is to be one of 0, 1, not 2"),
    ("piqa", {"label": True}, "'label' is to be one of 0, 1, not true"),
    ("piqa", {"sol2": " "}, "'sol2' is to be a sentence"),
    ("winogrande", {"sentence": "No gap here."}, "'sentence' is to have a gap (_) and something behind it"),
    ("boolq", {"label": 3}, "'label' is to be one of 0, 1, not 3"),
    ("openbookqa", {"answerKey": None}, "'answerKey' is to be one of A, B, C, D, not null"),
    ("lambada", {"text": "word"}, "'text' is to end with a word after a space"),
    ("mmlu", {"choices": ["1", "2"]}, "there are 2 options, and 4 are expected"),
]


@pytest.mark.parametrize(("name", "change", "what"), WRONG)
def test_a_wrong_row_is_named_by_its_line(name: str, change: dict, what: str, tmp_path: Path) -> None:
    row = HUB_ROWS[name][0]
    path = tmp_path / "rows.jsonl"
    with pytest.raises(BraidError) as caught:
        opened(name, path, [row, {**row, **change}])
    assert what in caught.value.what
    assert caught.value.where == f"{path}, line 2"


def test_a_key_misspelled(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"there is no 'label'\. Did you mean 'labl'"):
        opened("piqa", tmp_path / "rows.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b", "labl": 1}])
    (tmp_path / "rows.jsonl").write_text('{"goal": \n')
    with pytest.raises(BraidError, match="this line is not JSON"):
        TASKS["piqa"]().open(tmp_path / "rows.jsonl")
