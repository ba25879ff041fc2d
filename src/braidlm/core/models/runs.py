"""Run folders as others see them: which model folder is the newest, and what the metrics say last.

    RUN/recipe.yaml         what was run, resolved
    RUN/metrics.jsonl       a record per line: train, validation, sample
    RUN/checkpoints/NAME/   model folders

The training floor writes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json

RECIPE, METRICS, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "checkpoints"


def is_run(folder: Path | str) -> bool:
    """Whether a folder is a run's."""
    return (Path(folder) / RECIPE).is_file()


def model_folder(place: Path | str) -> Path:
    """A model folder as it is; of a run folder the newest checkpoint."""
    folder = Path(place)
    if not folder.is_dir():
        raise BraidError("there is no such folder", str(place), "Give a model folder or a run folder.")
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


def short_names(places: Sequence[Path | str]) -> dict[str, Path | str]:
    """Short names that tell the models apart: as little of each path as that needs."""
    parts = [[part for part in Path(place).resolve().parts if part != CHECKPOINTS] for place in places]
    for number, words in enumerate(parts):
        if words in parts[:number]:
            raise BraidError("this model is given twice", str(places[number]))
    # A checkpoint is called after its run too: many runs have a `step-001000`.
    short = [1 + (Path(place).resolve().parent.name == CHECKPOINTS) for place in places]
    while True:
        names = ["/".join(words[-length:]) for words, length in zip(parts, short, strict=True)]
        alike = [names.count(name) > 1 for name in names]
        if not any(alike):
            return dict(zip(names, places, strict=True))
        short = [length + more for length, more in zip(short, alike, strict=True)]


def newest_checkpoint(run: Path | str) -> Path | None:
    """The model folder of a run that has seen most, or None; folders being written are passed over."""
    found = [path.parent for path in (Path(run) / CHECKPOINTS).glob("*/config.json")]
    return max((folder for folder in found if not folder.name.startswith(".")), key=_age, default=None)


def last_records(run: Path | str) -> dict[str, dict[str, Any]]:
    """The last record of each kind in a run's metrics; a line cut off by a crash is passed over."""
    path = Path(run) / METRICS
    last: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return last
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
                last[record["kind"]] = record
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
    return last


def _age(folder: Path) -> tuple[int, str]:
    """Steps trained, then the time written inside: file times do not survive a copy."""
    path = folder / "lineage.json"
    lineage = read_json(path) if path.is_file() else {}
    return int((lineage.get("training") or {}).get("steps", 0)), str(lineage.get("created", ""))
