"""MMLU: 57 subjects, by the letter of the answer or by the answer itself; and its 18 subjects of science alone.

MMLU-STEM has the subjects whose field is physics, chemistry, biology, computer science, math or engineering in
`categories.py` of Hendrycks and others (2021). lm-evaluation-harness has a group of the same name, in which anatomy is
a nineteenth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.formats.multiple_choice import Question, endings
from braidlm.evals.rows import Row, Rows, TextFile, files_of, rows_of, sha256_of_files, table_rows
from braidlm.evals.tasks.choice import ChoiceTask
from braidlm.evals.tasks.task import TASKS, HubSource

LETTERS = ("A", "B", "C", "D")
EXAMPLE = '{"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "arithmetic"}'
EXAMPLE_CSV = "1 + 1?,1,2,3,4,B"
FIELDS = {
    "physics": ("astronomy", "college_physics", "conceptual_physics", "high_school_physics"),
    "chemistry": ("college_chemistry", "high_school_chemistry"),
    "biology": ("college_biology", "high_school_biology"),
    "computer science": (
        *("college_computer_science", "computer_security", "high_school_computer_science"),
        "machine_learning",
    ),
    "math": (
        *("abstract_algebra", "college_mathematics", "elementary_mathematics", "high_school_mathematics"),
        "high_school_statistics",
    ),
    "engineering": ("electrical_engineering",),
}
"""The subjects of each field of MMLU-STEM."""
STEM = {
    "subjects": tuple(subject for subjects in FIELDS.values() for subject in subjects),
    "size": "18 subjects, 3,018 questions of 4 options",
}


class MmluTask(ChoiceTask):
    """Questions of all subjects, or of some, read from the CSV files of the original or from rows as on the Hub."""

    size = "57 subjects, 14,042 questions of 4 options"
    licence = "MIT"
    locations = ("choice/mmlu", "mmlu")
    hub = HubSource("cais/mmlu", "all", ("dev", "test"))
    shots = 0
    subjects: tuple[str, ...] = ()
    """The subjects that are asked about; none for all."""
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
        """A question after a line on its subject and examples from the development set (tasks/mmlu/default)."""
        subject = row.text("subject")
        examples = self.examples.get(subject, [])
        if len(examples) < self.shots:
            raise row.error(f"there are {len(examples)} examples of this subject, and {self.shots} are to be shown")
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        solved = "".join(f"{_prompt(each)} {LETTERS[_answer(each)]}\n\n" for each in examples[: self.shots])
        return endings(about + solved + _prompt(row), LETTERS, _answer(row), subject)


TASKS.declare(
    "mmlu",
    MmluTask,
    description="MMLU: the letter of the answer, without examples; small models are near chance",
)
TASKS.declare(
    "mmlu_5shot",  # as papers report it; needs a context of a few thousand tokens
    MmluTask,
    description="MMLU: the letter of the answer after five examples of the subject",
    shots=5,
)
TASKS.declare(
    "mmlu_stem",
    MmluTask,
    description="MMLU-STEM: the letter of the answer in 18 subjects of science, without examples",
    **STEM,
)
TASKS.declare(
    "mmlu_stem_5shot",
    MmluTask,
    description="MMLU-STEM: the letter of the answer after five examples of the subject",
    shots=5,
    **STEM,
)


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


def _csv_rows(file: TextFile) -> Iterator[Row]:
    """Question, four options, letter: no heading; the subject is the file's name."""
    subject = file.stem.rpartition("_")[0] or file.stem
    for row in table_rows(file, ("question", *LETTERS, "answer"), EXAMPLE_CSV):
        answer = row.label("answer", LETTERS)
        fields = {"choices": [row.fields[letter] for letter in LETTERS], "answer": answer, "subject": subject}
        yield replace(row, fields={"question": row.fields["question"], **fields})
