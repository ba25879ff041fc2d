"""Reading run folders: the newest checkpoint, and the last records of the metrics.

    RUN/recipe.yaml         what was run, resolved
    RUN/metrics.jsonl       a record per line: train, validation, sample
    RUN/history.jsonl       when and where the run was started, and what stopped it with an error
    RUN/checkpoints/NAME/   model folders
    RUN/report.html         the page that `braid train` leaves at the end

`training` writes them.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import parse_row, read_json

RECIPE, METRICS, HISTORY, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "history.jsonl", "checkpoints"
PAGE = "report.html"
CONFIG, GATE_CONFIG, LORA_CONFIG = "config.json", "gate_config.json", "adapter_config.json"
MODEL_CONFIGS = (CONFIG, GATE_CONFIG, LORA_CONFIG)
"""A model folder has the first; a folder of gates or of LoRA adapters, which names its base, another."""


def is_run(folder: Path | str) -> bool:
    """Whether a folder is a run's."""
    return (Path(folder) / RECIPE).is_file()


def is_model_folder(folder: Path | str) -> bool:
    """Whether a folder is a model's, or that of adapters which name the model they are for."""
    return any((Path(folder) / name).is_file() for name in MODEL_CONFIGS)


def model_folders_in(parent: Path) -> list[Path]:
    """The model folders directly in a folder, by name; those being written are left out."""
    inside = sorted(parent.iterdir()) if parent.is_dir() else []
    return [folder for folder in inside if not folder.name.startswith(".") and is_model_folder(folder)]


def newest_checkpoint(run: Path | str) -> Path | None:
    """The model folder of a run with most training steps, or None; folders being written are ignored."""
    folders = model_folders_in(Path(run) / CHECKPOINTS)
    # The recorded time of creation decides between equal steps: file times do not survive a copy.
    return max(folders, key=lambda each: (checkpoint_steps(each), str(_lineage(each).get("created", ""))), default=None)


def read_metrics(run: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run's metrics, of one kind if given."""
    return [record for record in read_records(Path(run) / METRICS) if kind in (None, record["kind"])]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of metrics or of a run's history; a line cut off by a crash is ignored."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(BraidError):
            records.append(parse_row(line))
    return [record for record in records if isinstance(record.get("kind"), str)]


def last_records(run: Path | str) -> dict[str, dict[str, Any]]:
    """The last record of each kind in a run's metrics."""
    return {record["kind"]: record for record in read_metrics(run)}


def checkpoint_steps(folder: Path) -> int:
    """The training steps of a checkpoint; 0 where it does not say."""
    steps = training_of(_lineage(folder)).get("steps")
    return steps if isinstance(steps, int) else 0


def is_interruption(folder: Path | str) -> bool:
    """Whether a checkpoint was saved only because the run was stopped there; it is no point of a learning curve."""
    return training_of(_lineage(Path(folder))).get("interrupted") is True


def _lineage(folder: Path) -> dict[str, Any]:
    path = folder / "lineage.json"
    return read_json(path) if path.is_file() else {}


def training_of(lineage: dict[str, Any]) -> dict[str, Any]:
    """What a model's lineage says of its training."""
    training = lineage.get("training")
    return training if isinstance(training, dict) else {}


LENGTH = "length"
"""The key under which the record of a source keeps it, because what is made of a model has no recipe of its own."""


def length_record(lineage: Mapping[str, Any] | None) -> dict[str, int]:
    """The length that a source was trained at, for the lineage of what is made of it."""
    length = trained_length(lineage)
    return {} if length is None else {LENGTH: length}


def trained_length(lineage: Mapping[str, Any] | None) -> int | None:
    """The length of its recipe, or the largest of the models that it was made of; None where it is not known."""
    lineage = lineage or {}
    recipe = lineage.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    holders = [data] if isinstance(data, dict) else lineage.get("sources") or []
    lengths = [holder.get(LENGTH) or trained_length(holder.get("lineage")) for holder in holders]
    return max((length for length in lengths if isinstance(length, int) and length > 0), default=None)
