"""One file of all answers of a model, as `collate_preds` of the BabyLM 2025 pipeline makes it from its results folder.

It is made from what lies in the folder, as there, so that answers written at different times come together; only the
scores of checkpoints are taken from `braid.json`, where the pipeline computes them anew from answers and data.
"""

from pathlib import Path
from typing import Any

from braidlm.core.files import read_json
from braidlm.evals.babylm.checkpoint_names import words_of_name
from braidlm.evals.suites import SUITES

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
"""For each of our tasks the pipeline's name in the collated file, and its folder."""
FAST = {
    "blimp_fast": ("blimp", "blimp/blimp_fast"),
    "supplement_fast": ("blimp_supplement", "blimp/supplement_fast"),
    "ewok_fast": ("ewok", "ewok/ewok_fast"),
    "entity_tracking_fast": ("entity_tracking", "entity_tracking/entity_tracking_fast"),
    **{name: FULL[name] for name in ("wug_adj", "wug_past", "reading")},
}
GLUE = {name: name.partition("_")[2] for name in SUITES["glue_babylm"]}
AOA = "aoa"
MAIN, BACKEND = "main", "causal"
COLLATED = f"all_full_preds_and_fast_scores_{BACKEND}.json"
OURS = "braid.json"
CHECKPOINTS = tuple(f"chck_{millions}M" for millions in (*range(1, 10), *range(10, 101, 10)))
"""Those that the strict-small track wants; the other tracks want more after them."""


def zero_shot(folder: Path, revision: str) -> Path:
    """Where the pipeline keeps answers without fine-tuning."""
    return folder / revision / "zero_shot" / BACKEND


def collate(folder: Path) -> dict[str, Any]:
    """All answers of one model that are there."""
    main = zero_shot(folder, MAIN)
    found = {key: _answers(main / place) for key, place in FULL.values()}
    found[AOA] = _read(main / "AoA_word" / "surprisal.json")
    collated: dict[str, Any] = {key: answers for key, answers in found.items() if answers is not None}
    collated["glue"] = {}
    for task in GLUE.values():
        collated["glue"] |= _answers(folder / MAIN / "finetune" / task) or {}
    collated["fast_eval_results"] = {}
    for scores in _checkpoints(folder).values():
        for key, shares in scores.items():
            collated["fast_eval_results"].setdefault(key, []).append(shares)
    return collated


def lacking(folder: Path, collated: dict[str, Any]) -> list[str]:
    """What the leaderboard wants of the strict-small track, and is not there."""
    there = {*collated, *(f"glue {task}" for task in collated["glue"])}
    wanted = [*(key for key, _ in FULL.values()), AOA, *(f"glue {task}" for task in GLUE.values())]
    keys = {key for key, _ in FAST.values()}
    complete = {name for name, scores in _checkpoints(folder).items() if keys <= set(scores)}
    checkpoints = [name for name in CHECKPOINTS if name not in complete]
    return [key for key in wanted if key not in there] + [f"checkpoint {name}" for name in checkpoints]


def _checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """The fast scores of each checkpoint, in the order of training."""
    found = {path.parent.name: read_json(path)["fast_scores"] for path in folder.glob(f"*/{OURS}")}
    ordered = sorted(found, key=lambda name: (words_of_name(name) or 0, name))
    return {name: found[name] for name in ordered if found[name]}


def _answers(folder: Path) -> Any:
    return _read(folder / "predictions.json")


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
