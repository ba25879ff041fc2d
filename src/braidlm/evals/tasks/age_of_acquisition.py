"""Age of acquisition (Chang and Bergen, 2022; children's data of Wordbank): a task of whole runs."""

from pathlib import Path

from braidlm.evals.babylm.acquisition import Acquisition, read_acquisition
from braidlm.evals.babylm.data import COMMAND, LICENCE, babylm_fetch, babylm_places
from braidlm.evals.tasks.task import TASKS, Task


@TASKS.register("aoa")
class AgeOfAcquisition(Task):
    """Needs `--all-checkpoints`."""

    description = "are words learned in children's order? Over all checkpoints of a run; BabyLM 2025"
    size = "328 words in 20 contexts each"
    licence = f"{LICENCE}; of the children's data see wordbank.stanford.edu"
    metric = "Pearson's correlation with children's ages, x 100; of a checkpoint mean surprisal"
    places = babylm_places("full_eval/aoa", "full_eval/cdi_childes")
    fetch = babylm_fetch("full_eval/aoa")
    collection = COMMAND
    over_run = True

    def open(self, place: Path) -> Acquisition:
        return read_acquisition(place)
