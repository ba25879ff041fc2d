"""BLiMP: grammatical knowledge by minimal pairs, in the three forms that people report."""

from pathlib import Path

from braidlm.evals.babylm.data import COMMAND, LICENCE, babylm_fetch, babylm_places
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.formats.minimal_pairs import MinimalPairs, read_pairs
from braidlm.evals.tasks.task import TASKS, Task


class _MinimalPairTask(Task):
    metric = "accuracy, % (mean over sets)"

    def open(self, place: Path) -> MinimalPairs:
        return read_pairs(place)


@TASKS.register("blimp")
class Blimp(_MinimalPairTask):
    """BLiMP as published (Warstadt and others, 2020)."""

    description = "BLiMP as published: is the grammatical sentence of a minimal pair more probable?"
    size = "67 sets of 1,000 pairs"
    licence = "CC BY 4.0"
    places = ("blimp/data", "blimp")
    hub = HubSource("nyu-mll/blimp", splits=("train",), sets=True)
    fetch = f"`git clone https://github.com/alexwarstadt/blimp DATA/blimp`, or {hub.command}".format(task="blimp")


@TASKS.register("blimp_filtered")
class BlimpFiltered(_MinimalPairTask):
    """The pairs whose words all occur in the BabyLM corpora: the challenge's full evaluation."""

    description = "BLiMP with only words of the BabyLM corpora: the full evaluation of BabyLM 2025"
    size = "67 sets, 59,875 pairs"
    licence = f"CC BY 4.0 (BLiMP), {LICENCE}"
    places = babylm_places("full_eval/blimp_filtered")
    fetch = babylm_fetch("full_eval/blimp_filtered")
    collection = COMMAND


@TASKS.register("blimp_fast")
class BlimpFast(_MinimalPairTask):
    """200 pairs of each set: the challenge's fast evaluation, for checkpoints."""

    description = "a fifth of BLiMP: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "67 sets of 200 pairs"
    licence = f"CC BY 4.0 (BLiMP), {LICENCE}"
    places = babylm_places("fast_eval/blimp_fast")
    fetch = babylm_fetch("fast_eval/blimp_fast")
    collection = COMMAND
