"""BMLAMA: facts in several languages, every question in each of them (Qi, Fernández and Bisazza, 2023)."""

from pathlib import Path

from braidlm.evals.formats.fact_sentences import read_facts
from braidlm.evals.formats.multiple_choice import MultipleChoice, metric
from braidlm.evals.tasks.task import TASKS, Task

REPOSITORY = "Cross-Lingual-Consistency"
FETCH = f"`git clone https://github.com/Betswish/{REPOSITORY} DATA/{REPOSITORY}` gets it."


class _Bmlama(Task):
    licence = "CC BY-NC-SA 4.0 (mLAMA, of which it is made)"
    metric = metric("per token")

    def open(self, place: Path) -> MultipleChoice:
        return read_facts(place)


@TASKS.register("bmlama17")
class Bmlama17(_Bmlama):
    """17 languages."""

    description = "BMLAMA-17: which of up to ten answers makes the sentence of least perplexity, in each language"
    size = "6,792 facts in each of up to 17 languages"
    places = ("bmlama/BMLAMA17", "BMLAMA17", f"{REPOSITORY}/1_easyrun/BMLAMA17")
    fetch = FETCH


@TASKS.register("bmlama53")
class Bmlama53(_Bmlama):
    """53 languages."""

    description = "BMLAMA-53: the same with fewer facts in more languages"
    size = "3,070 facts in each of up to 53 languages"
    places = ("bmlama/BMLAMA53", "BMLAMA53", f"{REPOSITORY}/1_easyrun/BMLAMA53")
    fetch = FETCH
