"""PIQA: which of two solutions for a goal works."""

from braidlm.evals.files.choice_rows import numbered_options
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, endings
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS


@TASKS.register("piqa")
class Piqa(ChoiceTask):
    """`Question: ...\\nAnswer:` and a solution (lm-evaluation-harness, tasks/piqa)."""

    description = "PIQA: which of two ways to reach an everyday goal works"
    size = "1,838 goals (validation)"
    licence = "AFL 3.0"
    locations = ("choice/piqa.jsonl", "piqa.jsonl", "piqa")
    hub = HubSource("baber/piqa", None, ("validation",))

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(f"{row.text('query').rstrip()}\nAnswer:", *numbered_options(row))
        solutions = [row.text("sol1"), row.text("sol2")]
        return endings(f"Question: {row.text('goal')}\nAnswer:", solutions, row.label("label", (0, 1)))
