"""ARC: science questions of schools, the easy ones and those that simple methods miss."""

from braidlm.evals.files.choice_rows import labelled_options, numbered_options
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, endings, metric
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS


class _Arc(ChoiceTask):
    """`Question: ...\\nAnswer:` and an option (lm-evaluation-harness, tasks/arc)."""

    licence = "CC BY-SA 4.0"

    def question(self, row: Row) -> Question:
        if "query" in row.fields:
            return endings(f"{row.text('query').rstrip()}\nAnswer:", *numbered_options(row))
        return endings(f"Question: {row.text('question')}\nAnswer:", *labelled_options(row))


@TASKS.register("arc_easy")
class ArcEasy(_Arc):
    """The easy set."""

    description = "ARC, easy set: science questions of schools"
    size = "2,376 questions, mostly of 4 options"
    locations = ("choice/arc_easy.jsonl", "arc_easy.jsonl", "arc_easy")
    hub = HubSource("allenai/ai2_arc", "ARC-Easy")


@TASKS.register("arc_challenge")
class ArcChallenge(_Arc):
    """The challenge set; its usual score is by length."""

    description = "ARC, challenge set: those that retrieval and word counts get wrong"
    size = "1,172 questions, mostly of 4 options"
    headline = "per byte"
    metric = metric("per byte")
    locations = ("choice/arc_challenge.jsonl", "arc_challenge.jsonl", "arc_challenge")
    hub = HubSource("allenai/ai2_arc", "ARC-Challenge")
