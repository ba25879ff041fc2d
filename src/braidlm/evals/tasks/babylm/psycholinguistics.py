"""BabyLM 2025's own benchmarks: reading times, made-up words, age of acquisition."""

from braidlm.evals.babylm.acquisition import read_acquisition
from braidlm.evals.babylm.conventions import LICENCE, SOURCE
from braidlm.evals.babylm.reading import read_reading_times
from braidlm.evals.babylm.wug import read_forms
from braidlm.evals.tasks.task import TASKS, Task


@TASKS.register("reading")
class Reading(Task):
    """Eye tracking and self-paced reading (de Varda, Marelli and Amenta, 2023), each as a part."""

    description = "does surprisal say where people read slowly? Fast and full evaluation of BabyLM 2025"
    size = "1,726 words of 205 sentences"
    licence = f"{LICENCE}; of the original see doi.org/10.3758/s13428-023-02261-8"
    metric = "gain in explained variance, % (mean of eye tracking and self-paced)"
    babylm = ("full_eval/reading", "fast_eval/reading", "reading/reading_data.csv")
    fetch = f"It is `full_eval/reading/reading_data.csv` of {SOURCE}."
    open = staticmethod(read_reading_times)


class _MadeUp(Task):
    metric = "Spearman's correlation with people, x 100"
    licence = f"{LICENCE}; of the originals see their papers"
    open = staticmethod(read_forms)


@TASKS.register("wug_adj")
class WugAdjectives(_MadeUp):
    """-ity or -ness (Hofmann and others, 2024)."""

    description = "nouns of made-up adjectives, -ity or -ness: as people would? Fast and full evaluation of BabyLM 2025"
    size = "200 words"
    babylm = ("full_eval/wug_adj_nominalization", "fast_eval/wug_adj_nominalization")


@TASKS.register("wug_past")
class WugPast(_MadeUp):
    """Regular or like an irregular verb (Weissweiler and others, 2023)."""

    description = "the past tense of made-up verbs: as people would form it? Fast and full evaluation of BabyLM 2025"
    size = "50 words"
    babylm = ("full_eval/wug_past_tense", "fast_eval/wug_past_tense")


@TASKS.register("aoa")
class AgeOfAcquisition(Task):
    """Chang and Bergen (2022), with children's data of Wordbank: a task of whole runs (`--all-checkpoints`)."""

    description = "are words learned in children's order? Over all checkpoints of a run; BabyLM 2025"
    size = "485 words in 8,005 contexts"
    version = 2  # words with fewer than 20 contexts count too
    licence = f"{LICENCE}; of the children's data see wordbank.stanford.edu"
    metric = "Pearson's correlation with children's ages, x 100; of a checkpoint mean surprisal"
    babylm = ("full_eval/aoa", "full_eval/cdi_childes")
    scores_runs = True
    open = staticmethod(read_acquisition)
