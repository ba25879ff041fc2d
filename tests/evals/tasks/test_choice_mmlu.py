"""MMLU-STEM: exactly the subjects of science, in the CSV files of the original and in rows as on the Hub."""

import json
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.choice import FIELDS

SUBJECTS = ("anatomy", "astronomy", "machine_learning", "world_religions")


def folder_of(root: Path) -> Path:
    for split, count in (("dev", 5), ("test", 2)):
        (root / split).mkdir(parents=True)
        for subject in SUBJECTS:
            lines = [f"Is {n} {subject}?,a,b,c,d,{'ABCD'[n % 4]}\n" for n in range(count)]
            (root / split / f"{subject}_{split}.csv").write_text("".join(lines))
    return root


def test_the_subjects_are_those_of_the_original() -> None:
    subjects = [subject for field in FIELDS.values() for subject in field.split(", ")]
    assert (len(subjects), len(set(subjects))) == (18, 18)


@pytest.mark.parametrize("name", ["mmlu_stem", "mmlu_stem_5shot"])
def test_only_science_is_asked_and_as_in_mmlu(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    stem, whole = (TASKS[task]().open(folder) for task in (name, name.replace("_stem", "")))
    assert [question.of for question in stem.items] == ["astronomy"] * 2 + ["machine_learning"] * 2
    assert stem.items == [question for question in whole.items if question.of in ("astronomy", "machine_learning")]
    assert stem.fixed_options


def test_rows_of_the_hub(tmp_path: Path) -> None:
    rows = [{"question": "Is it?", "choices": list("abcd"), "answer": 1, "subject": subject} for subject in SUBJECTS]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [question.of for question in TASKS["mmlu_stem"]().open(tmp_path).items] == ["astronomy", "machine_learning"]
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(BraidError, match="no question about astronomy, college_physics"):
        TASKS["mmlu_stem"]().open(tmp_path)
