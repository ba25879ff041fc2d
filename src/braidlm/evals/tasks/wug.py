"""Made-up adjectives (Hofmann and others, 2024) and verbs (Weissweiler and others, 2023), inflected as people would."""

from pathlib import Path

from braidlm.evals.babylm.data import COMMAND, LICENCE, babylm_fetch, babylm_places
from braidlm.evals.babylm.wug import MadeUpWords, read_forms
from braidlm.evals.tasks.task import TASKS, Task


class _MadeUp(Task):
    metric = "Spearman's correlation with people, x 100"
    licence = f"{LICENCE}; of the originals see their papers"
    collection = COMMAND

    def open(self, place: Path) -> MadeUpWords:
        return read_forms(place)


@TASKS.register("wug_adj")
class WugAdjectives(_MadeUp):
    """-ity or -ness."""

    description = "nouns of made-up adjectives, -ity or -ness: as people would? Fast and full evaluation of BabyLM 2025"
    size = "200 words"
    places = babylm_places("full_eval/wug_adj_nominalization", "fast_eval/wug_adj_nominalization")
    fetch = babylm_fetch("full_eval/wug_adj_nominalization")


@TASKS.register("wug_past")
class WugPast(_MadeUp):
    """Regular or like an irregular verb."""

    description = "the past tense of made-up verbs: as people would form it? Fast and full evaluation of BabyLM 2025"
    size = "50 words"
    places = babylm_places("full_eval/wug_past_tense", "fast_eval/wug_past_tense")
    fetch = babylm_fetch("full_eval/wug_past_tense")
