"""MMLU: 57 subjects, by the letter of the answer or by the answer itself."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, Rows, rows_of
from braidlm.evals.files.text_files import TextFile, files_of, sha256_of_files
from braidlm.evals.formats.multiple_choice import Question, endings
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS

LETTERS = ("A", "B", "C", "D")
EXAMPLE = '{"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "arithmetic"}'
EXAMPLE_CSV = "1 + 1?,1,2,3,4,B"


class MmluTask(ChoiceTask):
    """Questions of all subjects, or of some, read from the CSV files of the original or from rows as on the Hub."""

    size = "57 subjects, 14,042 questions of 4 options"
    licence = "MIT"
    locations = ("choice/mmlu", "mmlu")
    hub = HubSource("cais/mmlu", "all", ("dev", "test"))
    shots = 0
    subjects: tuple[str, ...] = ()
    """Those that are asked about; none for all."""
    fixed_options = True

    def rows(self, path: Path) -> Rows:
        files = _files(path, "test")
        dev_files = _files(path, "dev") if self.shots else []
        self.examples: dict[str, list[Row]] = {}
        for row in _rows(dev_files):
            self.examples.setdefault(row.text("subject"), []).append(row)
        rows = [row for row in _rows(files) if not self.subjects or row.text("subject") in self.subjects]
        if self.subjects and not rows:
            raise BraidError(f"there is no question about {', '.join(self.subjects)}", str(path))
        return Rows(rows, sha256_of_files([*files, *dev_files]))

    def question(self, row: Row) -> Question:
        """With a line on the subject and examples from the development set before it (tasks/mmlu/default)."""
        subject = row.text("subject")
        examples = self.examples.get(subject, [])
        if len(examples) < self.shots:
            raise row.error(f"there are {len(examples)} examples of this subject, and {self.shots} are to be shown")
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        solved = "".join(f"{_prompt(each)} {LETTERS[_answer(each)]}\n\n" for each in examples[: self.shots])
        return endings(about + solved + _prompt(row), LETTERS, _answer(row), subject)


@TASKS.register("mmlu")
class Mmlu(MmluTask):
    """Which letter follows the question and its lettered options (lm-evaluation-harness, tasks/mmlu/default)."""

    description = "MMLU: the letter of the answer, without examples; small models are near chance"


@TASKS.register("mmlu_5shot")
class MmluFiveShots(MmluTask):
    """The same after five examples of the subject, as papers report it; needs a context of a few thousand tokens."""

    description = "MMLU: the letter of the answer after five examples of the subject"
    shots = 5


@TASKS.register("mmlu_continuation")
class MmluContinuation(MmluTask):
    """`Question: ...\\nAnswer:` and the answer's own words (tasks/mmlu/continuation): tells more of small models."""

    description = "MMLU: the answer's own words after the question"
    fixed_options = False

    def question(self, row: Row) -> Question:
        subject = row.text("subject")
        about = f"The following are questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        prompt = f"{about}Question: {row.text('question').strip()}\nAnswer:"
        return endings(prompt, row.texts("choices"), _answer(row), subject)


def _prompt(row: Row) -> str:
    choices = row.texts("choices")
    if len(choices) != len(LETTERS):
        raise row.error(f"there are {len(choices)} options, and {len(LETTERS)} are expected")
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([row.text("question").strip(), *options, "Answer:"])


def _answer(row: Row) -> int:
    return row.label("answer", range(len(LETTERS)))


def _files(path: Path, split: str) -> list[TextFile]:
    """CSV files in a folder of the split's name, or one JSONL file."""
    if path.is_file() and split == "test":
        return files_of(path)
    if (path / f"{split}.jsonl").is_file():
        return files_of(path / f"{split}.jsonl")
    if not (path / split).is_dir():
        raise BraidError(f"there is no {split}/SUBJECT_{split}.csv and no {split}.jsonl here", str(path))
    return files_of(path / split, ".csv")


def _rows(files: Sequence[TextFile]) -> list[Row]:
    return [
        row
        for file in files
        for row in (_csv_rows(file) if file.name.endswith(".csv") else rows_of([file], file.where, EXAMPLE))
    ]


def _csv_rows(file: TextFile) -> list[Row]:
    """Question, four options, letter: no heading; the subject is the file's name."""
    subject = file.stem.rpartition("_")[0] or file.stem
    reader = csv.reader(io.StringIO(file.text, newline=""))
    rows = []
    for cells in reader:
        row = Row({}, file.stem, f"{file.where}, line {reader.line_num}", EXAMPLE_CSV)
        if len(cells) != len(LETTERS) + 2:
            raise row.error(f"there are {len(cells)} cells, and {len(LETTERS) + 2} are expected")
        if cells[-1] not in LETTERS:
            raise row.error(f"the answer is to be one of {', '.join(LETTERS)}, not {cells[-1]!r}")
        fields = {"question": cells[0], "choices": cells[1:-1], "answer": LETTERS.index(cells[-1]), "subject": subject}
        rows.append(replace(row, fields=fields))
    return rows
