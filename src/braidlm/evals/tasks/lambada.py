"""LAMBADA: the last word of a passage, which needs all of it."""

from pathlib import Path

from braidlm.evals.files.choice_rows import question_rows
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.last_words import LastWords
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"text": "She went back for her hat, and there it was: her hat"}'


@TASKS.register("lambada")
class Lambada(Task):
    """The passages as OpenAI wrote them for GPT-2 (lm-evaluation-harness, tasks/lambada/lambada_openai)."""

    description = "LAMBADA: the last word of a passage, by the most probable tokens; its perplexity beside it"
    size = "5,153 passages"
    licence = "CC BY 4.0 (LAMBADA)"
    metric = "accuracy, %"
    locations = ("choice/lambada_openai.jsonl", "lambada_openai.jsonl", "lambada.jsonl", "lambada")
    hub = HubSource("EleutherAI/lambada_openai", "default")

    def open(self, path: Path) -> LastWords:
        rows = question_rows(path, EXAMPLE)
        return LastWords([_passage(row) for row in rows], rows.sha256)


def _passage(row: Row) -> tuple[str, str]:
    if "continuation" in row.fields:
        return row.text("context"), f" {row.text('continuation').strip()}"
    before, space, word = row.text("text").rpartition(" ")
    if not before.strip() or not word.strip():
        raise row.error("'text' is to end with a word after a space")
    return before, space + word
