"""Conventions of the BabyLM 2025 challenge: its tasks, where its data lies and comes from, names of checkpoints."""

FOLDERS = ("babylm-2025", "evaluation_data", "osfstorage/evaluation_data")
"""Usual names of the folder of the challenge's data; inside are `full_eval` and `fast_eval`."""
SOURCE = "the BabyLM 2025 evaluation data (https://osf.io/ryjfm/)"
COMMAND = (
    "`pip install osfclient && osf -p ryjfm clone DATA` gets the BabyLM 2025 data (its folder evaluation_data is all "
    "that is needed)."
)
"""How to get the challenge's data; shown once, however many of its tasks are evaluated."""
LICENCE = "Apache 2.0 (BabyLM's files)"
"""The LICENSE beside the data; the data sets that it was made from have terms of their own."""
FULL = {
    "blimp_filtered": ("blimp", "blimp/blimp_filtered"),
    "blimp_supplement": ("blimp_supplement", "blimp/supplement_filtered"),
    "ewok": ("ewok", "ewok/ewok_filtered"),
    "entity_tracking": ("entity_tracking", "entity_tracking/entity_tracking"),
    "wug_adj": ("wug_adj", "wug_adj/wug_adj_nominalization"),
    "wug_past": ("wug_past", "wug_past/wug_past_tense"),
    "comps": ("comps", "comps/comps"),
    "reading": ("reading", "reading"),
}
"""The tasks of the full evaluation: of each the pipeline's name in the collated file, and its folder."""
FAST = {
    "blimp_fast": ("blimp", "blimp/blimp_fast"),
    "supplement_fast": ("blimp_supplement", "blimp/supplement_fast"),
    "ewok_fast": ("ewok", "ewok/ewok_fast"),
    "entity_tracking_fast": ("entity_tracking", "entity_tracking/entity_tracking_fast"),
    **{name: FULL[name] for name in ("wug_adj", "wug_past", "reading")},
}
"""The tasks of the fast evaluation, for checkpoints."""
_GLUE = ("superglue_boolq", "glue_mnli", "glue_mrpc", "superglue_multirc", "glue_qqp", "glue_rte", "superglue_wsc")
GLUE = {task: task.partition("_")[2] for task in _GLUE}
"""The tasks with fine-tuning, and the pipeline's names."""
AOA = "aoa"
"""Age of acquisition, a task of all checkpoints of a run."""


def babylm_locations(*paths: str) -> tuple[str, ...]:
    """The usual locations of `full_eval/NAME` or `fast_eval/NAME` inside the data folder, in the order to be tried."""
    locations: list[str] = []
    for path in paths:
        locations += [*(f"{folder}/{path}" for folder in FOLDERS), path, path.rpartition("/")[2]]
    return tuple(dict.fromkeys(locations))
