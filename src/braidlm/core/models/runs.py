"""Reading run folders: the newest model folder, and the last records of the metrics.

    RUN/recipe.yaml         what was run, resolved
    RUN/metrics.jsonl       a record per line: train, validation, sample
    RUN/checkpoints/NAME/   model folders

`training` writes them.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json

RECIPE, METRICS, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "checkpoints"


def is_run(folder: Path | str) -> bool:
    """Whether a folder is a run's."""
    return (Path(folder) / RECIPE).is_file()


def model_folder(path: Path | str) -> Path:
    """A model folder itself, or the newest checkpoint of a run folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise BraidError("there is no such folder", str(path), "Give a model folder or a run folder.")
    if (folder / "config.json").is_file():
        return folder
    if not is_run(folder):
        raise BraidError(
            "this is neither a model folder (no config.json) nor a run folder (no recipe.yaml)", str(folder)
        )
    newest = newest_checkpoint(folder)
    if newest is None:
        raise BraidError("this run has no checkpoint yet", str(folder), "Let `braid train` go on to its first one.")
    return newest


def short_names(paths: Sequence[Path | str]) -> dict[str, Path | str]:
    """Short unique names of models: as many of each path's last parts as needed."""
    parts = [[part for part in Path(path).resolve().parts if part != CHECKPOINTS] for path in paths]
    for number, words in enumerate(parts):
        if words in parts[:number]:
            raise BraidError("this model is given twice", str(paths[number]))
    # The name of a checkpoint includes its run, since many runs have a `step-001000`.
    lengths = [1 + (Path(path).resolve().parent.name == CHECKPOINTS) for path in paths]
    while True:
        names = ["/".join(words[-length:]) for words, length in zip(parts, lengths, strict=True)]
        ambiguous = [names.count(name) > 1 for name in names]
        if not any(ambiguous):
            return dict(zip(names, paths, strict=True))
        lengths = [length + more for length, more in zip(lengths, ambiguous, strict=True)]


def newest_checkpoint(run: Path | str) -> Path | None:
    """The model folder of a run with most training steps, or None; folders being written are ignored."""
    folders = [path.parent for path in (Path(run) / CHECKPOINTS).glob("*/config.json")]
    return max((folder for folder in folders if not folder.name.startswith(".")), key=_age, default=None)


def read_metrics(run: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run's metrics, of one kind if given; a line cut off by a crash is ignored."""
    path = Path(run) / METRICS
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and "kind" in r and kind in (None, r["kind"])]


def last_records(run: Path | str) -> dict[str, dict[str, Any]]:
    """The last record of each kind in a run's metrics."""
    return {record["kind"]: record for record in read_metrics(run)}


def _age(folder: Path) -> tuple[int, str]:
    """Training steps, then the recorded time of creation (file times do not survive a copy)."""
    path = folder / "lineage.json"
    lineage = read_json(path) if path.is_file() else {}
    return int((lineage.get("training") or {}).get("steps", 0)), str(lineage.get("created", ""))
