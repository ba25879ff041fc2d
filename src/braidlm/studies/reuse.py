"""What a study made before: a folder that was made of the same models in the same way is used again."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.integrity import model_hash
from braidlm.core.models.runs import is_run, newest_checkpoint
from braidlm.opening.open import open_model
from braidlm.training.features.distill.teachers import TEACHER


def is_made_of(folder: Path, sources: Sequence[Path], options: Mapping[str, Any] | None = None) -> bool:
    """Whether a model folder's lineage names exactly the weights of these models, and these options of an edit."""
    lineage = load_lineage(folder) or {}
    before = [source for source in lineage.get("sources", []) if "data" not in source]
    now = [open_model(source, "braid").record() for source in sources]
    same = list(map(_weights, before)) == list(map(_weights, now))
    return same and (options is None or options.items() <= lineage.get("options", {}).items())


def is_trained_from(run: Path, start: Path) -> bool:
    """Whether a run's newest checkpoint began with this model's weights."""
    newest = newest_checkpoint(run)
    return newest is not None and is_made_of(newest, [start])


def is_taught_by(run: Path, teachers: Sequence[Path]) -> bool:
    """Whether a run's newest checkpoint learned from these models as they are now."""
    newest = newest_checkpoint(run)
    sources = [] if newest is None else (load_lineage(newest) or {}).get("sources", [])
    before = [source["sha256"] for source in sources if source.get("role") == TEACHER]
    return before == [model_hash(teacher) for teacher in teachers]


def remove_made(folder: Path) -> None:
    """Remove a model folder that is to be made anew; a run in its place is somebody's training."""
    if is_run(folder):
        raise BraidError(
            "a run stands where an edited model should be: this step was trained before, and is not any more",
            str(folder),
            "Remove the folder, or give the step another name.",
        )
    shutil.rmtree(folder)


def _weights(record: Mapping[str, Any]) -> Any:
    """What identifies the weights of a source: the hash of Braid's file, or those of another format."""
    return record.get("sha256") or record.get("weights")
