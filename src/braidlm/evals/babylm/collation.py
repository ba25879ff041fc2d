"""One file of all predictions of a model, as `collate_preds` of the BabyLM 2025 pipeline makes it from its folder.

It is made from the files in the folder, as there, so that predictions of different evaluations come together; only the
scores of checkpoints are read from `braid.json`, where the pipeline computes them again from predictions and data.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from braidlm.core.reading import read_json
from braidlm.evals.babylm.conventions import AOA, FAST, FULL, GLUE
from braidlm.opening.names import words_in_name

MAIN, BACKEND = "main", "causal"
COLLATED = f"all_full_preds_and_fast_scores_{BACKEND}.json"
OURS = "braid.json"
CHECKPOINTS = tuple(f"chck_{millions}M" for millions in (*range(1, 10), *range(10, 101, 10)))
"""Those that the strict-small track requires; the other tracks require more after them."""
PIPELINE = "591121d1758efc535237d8f320b298eada1040dc"
"""The revision of github.com/babylm/evaluation-pipeline-2025 whose collation these files are for."""
AOA_ROWS = 8005
"""The surprisals of each checkpoint that it requires; earlier revisions left out words with fewer than 20 contexts."""


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
    """The tasks that the leaderboard requires for the strict-small track, and the folder does not have."""
    missing = [task for task, (key, _) in FULL.items() if key not in collated]
    missing += [] if AOA in collated and _is_complete(collated[AOA]) else [AOA]
    missing += [task for task, key in GLUE.items() if key not in collated["glue"]]
    keys = {key for key, _ in FAST.values()}
    complete = {name for name, scores in _checkpoints(folder).items() if keys <= set(scores)}
    checkpoints = [name for name in CHECKPOINTS if name not in complete]
    return missing + [f"checkpoint {name}" for name in checkpoints]


def _is_complete(surprisals: dict[str, Any]) -> bool:
    """Whether there are as many surprisals of every checkpoint as the collation requires."""
    return Counter(row["step"] for row in surprisals["results"]) == dict.fromkeys(CHECKPOINTS, AOA_ROWS)


def _checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """The fast scores of each checkpoint, in the order of training."""
    scores = {path.parent.name: read_json(path)["fast_scores"] for path in folder.glob(f"*/{OURS}")}
    ordered = sorted(scores, key=lambda name: (words_in_name(name) or 0, name))
    return {name: scores[name] for name in ordered if scores[name]}


def _predictions(folder: Path) -> Any:
    return _read(folder / "predictions.json")


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
