"""BLiMP: grammatical knowledge by minimal pairs, in the three forms that people report."""

from pathlib import Path

from braidlm.evals.minimal_pairs import MinimalPairs, read_pairs
from braidlm.evals.tasks.task import TASKS, Task

BABYLM = "It is `{}` of the BabyLM 2025 evaluation data (https://osf.io/ryjfm/, folder evaluation_data)."


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
    fetch = "`git clone https://github.com/alexwarstadt/blimp` into the data folder gets it."


@TASKS.register("blimp_filtered")
class BlimpFiltered(_MinimalPairTask):
    """The pairs whose words all occur in the BabyLM corpora: the challenge's full evaluation."""

    description = "BLiMP with only words of the BabyLM corpora: the full evaluation of BabyLM 2025"
    size = "67 sets, 59,875 pairs"
    licence = "CC BY 4.0 (BLiMP), Apache 2.0 (selection)"
    places = (
        "babylm-2025/full_eval/blimp_filtered",
        "evaluation_data/full_eval/blimp_filtered",
        "full_eval/blimp_filtered",
        "blimp_filtered",
    )
    fetch = BABYLM.format("full_eval/blimp_filtered")


@TASKS.register("blimp_fast")
class BlimpFast(_MinimalPairTask):
    """200 pairs of each set: the challenge's fast evaluation, for checkpoints."""

    description = "a fifth of BLiMP: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "67 sets of 200 pairs"
    licence = "CC BY 4.0 (BLiMP), Apache 2.0 (selection)"
    places = (
        "babylm-2025/fast_eval/blimp_fast",
        "evaluation_data/fast_eval/blimp_fast",
        "fast_eval/blimp_fast",
        "blimp_fast",
    )
    fetch = BABYLM.format("fast_eval/blimp_fast")
