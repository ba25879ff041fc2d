"""Names that stand for several tasks."""

from collections.abc import Sequence

SUITES: dict[str, tuple[str, ...]] = {
    "babylm_fast": (
        "blimp_fast",
        "supplement_fast",
        "ewok_fast",
        "entity_tracking_fast",
        "wug_adj",
        "wug_past",
        "reading",
    ),
    "babylm_full": (
        "blimp_filtered",
        "blimp_supplement",
        "ewok",
        "entity_tracking",
        "wug_adj",
        "wug_past",
        "comps",
        "reading",
    ),
    "glue_babylm": (
        "superglue_boolq",
        "glue_mnli",
        "glue_mrpc",
        "superglue_multirc",
        "glue_qqp",
        "glue_rte",
        "superglue_wsc",
    ),
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
