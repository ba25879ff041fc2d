"""One file of all predictions of a model, as `collate_preds` of the BabyLM 2025 pipeline makes it from its folder.

It is made from the files in the folder, as there, so that predictions of different evaluations come together; only the
scores of checkpoints are read from `braid.json`, where the pipeline computes them again from predictions and data.
"""

from pathlib import Path
from typing import Any

from braidlm.core.reading import read_json
from braidlm.evals.babylm.conventions import AOA, FAST, FULL, GLUE, words_in_name

MAIN, BACKEND = "main", "causal"
COLLATED = f"all_full_preds_and_fast_scores_{BACKEND}.json"
OURS = "braid.json"
CHECKPOINTS = tuple(f"chck_{millions}M" for millions in (*range(1, 10), *range(10, 101, 10)))
"""Those that the strict-small track requires; the other tracks require more after them."""


def zero_shot(folder: Path, revision: str) -> Path:
    """The pipeline's folder of predictions without fine-tuning."""
    return folder / revision / "zero_shot" / BACKEND


def collate(folder: Path) -> dict[str, Any]:
    """All predictions of one model in its folder."""
    main = zero_shot(folder, MAIN)
    predictions = {key: _predictions(main / subfolder) for key, subfolder in FULL.values()}
    predictions[AOA] = _read(main / "AoA_word" / "surprisal.json")
    collated: dict[str, Any] = {key: some for key, some in predictions.items() if some is not None}
    collated["glue"] = {}
    for task in GLUE.values():
        collated["glue"] |= _predictions(folder / MAIN / "finetune" / task) or {}
    collated["fast_eval_results"] = {}
    for scores in _checkpoints(folder).values():
        for key, shares in scores.items():
            collated["fast_eval_results"].setdefault(key, []).append(shares)
    return collated


def missing_entries(folder: Path, collated: dict[str, Any]) -> list[str]:
    """What the leaderboard requires for the strict-small track, and the folder does not have."""
    present = {*collated, *(f"glue {task}" for task in collated["glue"])}
    required = [*(key for key, _ in FULL.values()), AOA, *(f"glue {task}" for task in GLUE.values())]
    keys = {key for key, _ in FAST.values()}
    complete = {name for name, scores in _checkpoints(folder).items() if keys <= set(scores)}
    checkpoints = [name for name in CHECKPOINTS if name not in complete]
    return [key for key in required if key not in present] + [f"checkpoint {name}" for name in checkpoints]


def _checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """The fast scores of each checkpoint, in the order of training."""
    scores = {path.parent.name: read_json(path)["fast_scores"] for path in folder.glob(f"*/{OURS}")}
    ordered = sorted(scores, key=lambda name: (words_in_name(name) or 0, name))
    return {name: scores[name] for name in ordered if scores[name]}


def _predictions(folder: Path) -> Any:
    return _read(folder / "predictions.json")


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
