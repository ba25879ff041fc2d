"""WinoGrande: which of two names fits a gap, by the probability of the rest of the sentence."""

from braidlm.evals.files.choice_rows import numbered_options
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row
from braidlm.evals.formats.multiple_choice import Question, beginnings
from braidlm.evals.tasks.choice.choice_task import ChoiceTask
from braidlm.evals.tasks.task import TASKS


@TASKS.register("winogrande")
class WinoGrande(ChoiceTask):
    """Partial evaluation (Trinh and Le, 2018): only what follows the gap is scored, as in lm-evaluation-harness
    (tasks/winogrande)."""

    description = "WinoGrande: which of two names fits a gap, by the probability of the rest of the sentence"
    size = "1,267 sentences"
    licence = "CC BY"
    locations = ("choice/winogrande.jsonl", "winogrande.jsonl", "winogrande")
    hub = HubSource("allenai/winogrande", "winogrande_xl", ("validation",))

    def question(self, row: Row) -> Question:
        if "context_options" in row.fields:
            contexts, answer = numbered_options(row, "context_options")
            return beginnings(contexts, row.text("continuation"), answer)
        before, gap, after = row.text("sentence").partition("_")
        if not gap or not after.strip():
            raise row.error("'sentence' is to have a gap (_) and something behind it")
        contexts = [before + row.text(option) for option in ("option1", "option2")]
        return beginnings(contexts, after.strip(), row.label("answer", (1, 2)))
