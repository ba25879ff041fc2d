"""Names that stand for several tasks."""

from collections.abc import Sequence

from braidlm.evals.babylm.conventions import FAST, FULL, GLUE

SUITES: dict[str, tuple[str, ...]] = {
    "babylm_fast": tuple(FAST),
    "babylm_full": tuple(FULL),
    "glue_babylm": tuple(GLUE),
    "choice": (
        "arc_easy",
        "arc_challenge",
        "winogrande",
        "hellaswag",
        "piqa",
        "openbookqa",
        "boolq",
        "lambada",
    ),
    "bmlama": ("bmlama17", "bmlama53"),
}
"""The evaluations of BabyLM 2025: for checkpoints, for a finished model, and with fine-tuning. Age of acquisition
(`aoa`) needs all checkpoints of a run and is in no suite. `choice` has the tasks that many papers report without
fine-tuning, `bmlama` facts in several languages."""


def expand(names: Sequence[str]) -> list[str]:
    """Tasks for names of suites and tasks, each once, in the order of the names."""
    return list(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))
