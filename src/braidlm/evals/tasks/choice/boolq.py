"""BoolQ without fine-tuning: yes or no after a passage and a question."""

from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, endings
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS

ANSWERS = ("no", "yes")


@TASKS.register("boolq")
class BoolQ(ChoiceTask):
    """`Passage\\nQuestion: ...?\\nAnswer:` and yes or no (lm-evaluation-harness, tasks/super_glue/boolq)."""

    description = "BoolQ, zero-shot: is yes or no more probable after a passage and a question (62.2% are yes)"
    size = "3,270 questions (validation)"
    licence = "CC BY-SA 3.0"
    locations = ("choice/boolq.jsonl", "boolq.jsonl", "boolq")
    hub = HubSource("aps/super_glue", "boolq", ("validation",))
    fixed_options = True

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            prompt = row.text("query").removeprefix("Passage: ").rstrip()
            return endings(f"{prompt}\nAnswer:", ANSWERS, row.label("gold", range(len(ANSWERS))))
        prompt = f"{row.text('passage')}\nQuestion: {row.text('question')}?\nAnswer:"
        return endings(prompt, ANSWERS, _label(row))


def _label(row: Row) -> int:
    """0 or 1, or false or true, under `label` (SuperGLUE) or `answer` (BoolQ's own files)."""
    key = "answer" if "answer" in row.fields else "label"
    value = row.value(key)
    return int(value) if isinstance(value, bool) else row.label(key, range(len(ANSWERS)))
