"""HellaSwag: how an everyday scene goes on."""

import re

from braidlm.evals.files.choice_rows import numbered_options
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, endings, metric
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS


@TASKS.register("hellaswag")
class HellaSwag(ChoiceTask):
    """`Activity: what happens` and an ending, cleaned as lm-evaluation-harness does (tasks/hellaswag).

    Rows with only `question` (the scene), `choices` by letter and `answer` have no activity before the scene.
    """

    description = "HellaSwag: which of four endings follows a scene"
    size = "10,042 scenes (validation), or as many as the file has"
    licence = "MIT"
    headline = "per byte"
    metric = metric("per byte")
    locations = ("choice/hellaswag.jsonl", "hellaswag.jsonl", "hellaswag", "choice/hellaswag-2000.json")
    hub = HubSource("Rowan/hellaswag", None, ("validation",))

    def question(self, row: Row) -> Question:
        if "endings" in row.fields:
            choices, answer = numbered_options(row, "endings", "label")
            scene = f"{row.text('activity_label')}: {row.text('ctx_a')} {str(row.value('ctx_b')).capitalize()}"
            return endings(cleaned(scene), [cleaned(choice) for choice in choices], answer)
        letters = row.inner("choices")
        choices = [cleaned(letters.text(letter)) for letter in sorted(letters.fields)]
        return endings(cleaned(row.text("question")).lstrip(), choices, row.label("answer", sorted(letters.fields)))


def cleaned(text: str) -> str:
    """Without the marks in brackets that WikiHow's part has."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
