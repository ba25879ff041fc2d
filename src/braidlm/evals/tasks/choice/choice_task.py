"""The base class of multiple-choice tasks: rows of JSON files become questions."""

from abc import abstractmethod
from pathlib import Path

from braidlm.evals.files.choice_rows import question_rows
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, Rows
from braidlm.evals.formats.multiple_choice import Measure, MultipleChoice, Question, metric
from braidlm.evals.tasks.task import Task

EXAMPLE = '{"query": "The sky is", "choices": ["blue", "loud"], "gold": 0}'


class ChoiceTask(Task):
    """A task whose rows are questions. Prompts are those of lm-evaluation-harness, without examples before them.

    Rows have the fields of the data set on the Hub, or a complete prompt and options (`query`, `choices`, `gold`).
    """

    headline: Measure = "raw"
    metric = metric("raw")
    hub: HubSource
    fixed_options = False

    def open(self, path: Path) -> MultipleChoice:
        rows = self.rows(path)
        questions = [self.question(row) for row in rows]
        return MultipleChoice(questions, rows.sha256, self.headline, fixed_options=self.fixed_options)

    def rows(self, path: Path) -> Rows:
        """Read the rows."""
        return question_rows(path, EXAMPLE)

    @abstractmethod
    def question(self, row: Row) -> Question:
        """One row as a question."""
