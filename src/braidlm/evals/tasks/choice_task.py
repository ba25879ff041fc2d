"""What the multiple-choice tasks have in common: rows of JSON files become questions."""

from abc import abstractmethod
from pathlib import Path

from braidlm.evals.hub_data import HubSource
from braidlm.evals.json_rows import Row, hash_of, json_files, read_rows
from braidlm.evals.multiple_choice import Measure, MultipleChoice, Question, checked, metric
from braidlm.evals.tasks.task import Task


class ChoiceTask(Task):
    """A task whose rows are questions. Prompts are those of lm-evaluation-harness, without examples before them.

    Rows may be written as the data set is on the Hub, or with prompt and options ready (`query`, `choices`, `gold`).
    """

    headline: Measure = "raw"
    metric = metric("raw")
    hub: HubSource

    def open(self, place: Path) -> MultipleChoice:
        files = json_files(place)
        questions = [self.question(row) for file in files for row in read_rows(file)]
        return MultipleChoice(checked(questions, str(place)), hash_of(files), self.headline)

    @abstractmethod
    def question(self, row: Row) -> Question:
        """One row as a question."""


def labelled(row: Row) -> tuple[list[str], int]:
    """Options and answer of a row with `choices: {text, label}` and `answerKey`."""
    choices = row.inner("choices")
    texts, labels = choices.texts("text"), choices.texts("label")
    if len(texts) != len(labels):
        raise row.error(f"there are {len(texts)} options and {len(labels)} labels")
    return texts, row.choice("answerKey", labels)


def numbered(row: Row) -> tuple[list[str], int]:
    """Options and answer of a row with `choices` and `gold`."""
    choices = row.texts("choices")
    return choices, row.choice("gold", range(len(choices)))
