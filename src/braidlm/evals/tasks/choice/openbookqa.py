"""OpenBookQA: elementary science, without the book."""

from braidlm.evals.files.choice_rows import labelled_options, numbered_options
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, endings, metric
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS


@TASKS.register("openbookqa")
class OpenBookQA(ChoiceTask):
    """The question's stem and an option (lm-evaluation-harness, tasks/openbookqa)."""

    description = "OpenBookQA: elementary science, which of four endings is true"
    size = "500 questions"
    licence = "none is stated (see allenai.org/data/open-book-qa)"
    headline = "per byte"
    metric = metric("per byte")
    locations = ("choice/openbook_qa.jsonl", "openbook_qa.jsonl", "openbookqa.jsonl", "openbookqa")
    hub = HubSource("allenai/openbookqa", "main")

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(row.text("query"), *numbered_options(row))
        return endings(row.text("question_stem"), *labelled_options(row))
