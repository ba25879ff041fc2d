"""BLiMP, grammatical knowledge by minimal pairs, in the three versions that people report, and its supplement."""

from braidlm.evals.babylm.conventions import LICENCE
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.formats.minimal_pairs import METRIC, read_pairs
from braidlm.evals.tasks.task import TASKS, Task


class _MinimalPairTask(Task):
    metric = METRIC
    open = staticmethod(read_pairs)


@TASKS.register("blimp")
class Blimp(_MinimalPairTask):
    """BLiMP as published (Warstadt and others, 2020)."""

    description = "BLiMP as published: is the grammatical sentence of a minimal pair more probable?"
    size = "67 sets of 1,000 pairs"
    licence = "CC BY 4.0"
    locations = ("blimp/data", "blimp")
    hub = HubSource("nyu-mll/blimp", splits=("train",), sets=True)
    fetch = f"`git clone https://github.com/alexwarstadt/blimp DATA/blimp`, or {hub.command}"


@TASKS.register("blimp_filtered")
class BlimpFiltered(_MinimalPairTask):
    """The pairs whose words all occur in the BabyLM corpora: the challenge's full evaluation."""

    description = "BLiMP with only words of the BabyLM corpora: the full evaluation of BabyLM 2025"
    size = "67 sets, 59,875 pairs"
    licence = f"CC BY 4.0 (BLiMP), {LICENCE}"
    babylm = ("full_eval/blimp_filtered",)


@TASKS.register("blimp_fast")
class BlimpFast(_MinimalPairTask):
    """200 pairs of each set: the challenge's fast evaluation, for checkpoints."""

    description = "a fifth of BLiMP: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "67 sets of 200 pairs"
    licence = f"CC BY 4.0 (BLiMP), {LICENCE}"
    babylm = ("fast_eval/blimp_fast",)


@TASKS.register("blimp_supplement")
class BlimpSupplement(_MinimalPairTask):
    """Dialogue and questions, made for the BabyLM challenge: its full evaluation."""

    description = "minimal pairs of dialogue, questions and hypernyms: the full evaluation of BabyLM 2025"
    size = "5 sets, 5,218 pairs"
    licence = LICENCE
    babylm = ("full_eval/supplement_filtered",)


@TASKS.register("supplement_fast")
class SupplementFast(_MinimalPairTask):
    """50 pairs of each set: the challenge's fast evaluation, for checkpoints."""

    description = "a part of the BLiMP supplement: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "5 sets of 50 pairs"
    licence = LICENCE
    babylm = ("fast_eval/supplement_fast",)
