"""Reading times (de Varda, Marelli and Amenta, 2023): eye tracking and self-paced reading."""

from pathlib import Path

from braidlm.evals.babylm.data import COMMAND, LICENCE, babylm_fetch, babylm_places
from braidlm.evals.babylm.reading import ReadingTimes, read_reading_times
from braidlm.evals.tasks.task import TASKS, Task


@TASKS.register("reading")
class Reading(Task):
    """Both, and each as a part."""

    description = "does surprisal say where people read slowly? Fast and full evaluation of BabyLM 2025"
    size = "1,726 words of 205 sentences"
    licence = f"{LICENCE}; of the original see doi.org/10.3758/s13428-023-02261-8"
    metric = "gain in explained variance, % (mean of eye tracking and self-paced)"
    places = babylm_places("full_eval/reading", "fast_eval/reading", "reading/reading_data.csv")
    fetch = babylm_fetch("full_eval/reading/reading_data.csv")
    collection = COMMAND

    def open(self, place: Path) -> ReadingTimes:
        return read_reading_times(place)
