"""The BLiMP supplement of the BabyLM challenge: dialogue and questions, by minimal pairs."""

from pathlib import Path

from braidlm.evals.babylm.data import COMMAND, LICENCE, babylm_fetch, babylm_places
from braidlm.evals.formats.minimal_pairs import METRIC, MinimalPairs, read_pairs
from braidlm.evals.tasks.task import TASKS, Task


class _Supplement(Task):
    metric = METRIC
    licence = LICENCE
    collection = COMMAND

    def open(self, place: Path) -> MinimalPairs:
        return read_pairs(place)


@TASKS.register("blimp_supplement")
class BlimpSupplement(_Supplement):
    """The full evaluation's."""

    description = "minimal pairs of dialogue, questions and hypernyms: the full evaluation of BabyLM 2025"
    size = "5 sets, 5,218 pairs"
    places = babylm_places("full_eval/supplement_filtered")
    fetch = babylm_fetch("full_eval/supplement_filtered")


@TASKS.register("supplement_fast")
class SupplementFast(_Supplement):
    """The fast evaluation's, for checkpoints."""

    description = "a part of the BLiMP supplement: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "5 sets of 50 pairs"
    places = babylm_places("fast_eval/supplement_fast")
    fetch = babylm_fetch("fast_eval/supplement_fast")
