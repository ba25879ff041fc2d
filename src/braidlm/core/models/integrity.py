"""Whether a file of weights is the one that was saved, and holds numbers only; each file is read once a process."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from braidlm.core.differences import listed
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.runs import MODEL_CONFIGS

ALLOW_CHANGED = "BRAID_ALLOW_CHANGED_WEIGHTS"
"""The environment variable that lets weights differ from what their lineage records."""
HASHED_FILES = (
    "*.safetensors",
    "*.bin",
    *MODEL_CONFIGS,
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
"""The files that determine a model's scores."""


def check_hash(path: Path, lineage: Mapping[str, Any] | None) -> None:
    """Refuse weights that are not those of the lineage beside them, if it names some."""
    recorded = _recorded(path.name, (lineage or {}).get("weights"))
    if recorded is None or os.environ.get(ALLOW_CHANGED) == "1":
        return
    if file_sha256(path) != recorded:
        raise BraidError(
            f"{path.name} is not the file that lineage.json records (another SHA-256): it was damaged or changed",
            str(path.parent),
            f"Use another copy. If it was changed on purpose, set {ALLOW_CHANGED}=1, or save the model anew.",
        )


def _recorded(name: str, weights: Any) -> Any:
    """The hash that a lineage has of a file of weights, whether it names one file or several."""
    if not isinstance(weights, dict):
        return None
    if isinstance(files := weights.get("files"), dict):
        return files.get(name)
    return weights.get("sha256") if weights.get("file") == name else None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, which is read once a process."""
    return _sha256(*_version(path))


def check_finite(path: Path) -> None:
    """Refuse weights that are not numbers: one of them makes every prediction meaningless, and none says so."""
    if names := _not_finite_in(*_version(path)):
        raise not_finite_error(names, str(path.parent))


def model_hash(folder: Path) -> str:
    """SHA-256 over all files that determine the model's scores."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in HASHED_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors that hold NaN or infinity."""
    return [name for name, tensor in tensors if tensor.is_floating_point() and not _is_finite(tensor)]


def not_finite_error(names: list[str], where: str) -> BraidError:
    """The error for weights that hold NaN or infinity."""
    return BraidError(
        f"weights are not finite (NaN or infinite): {listed(names)}",
        where,
        "Use an earlier checkpoint; training that diverged needs a smaller learning rate or a longer warmup.",
    )


@lru_cache(maxsize=512)
def _sha256(path: str, size: int, changed: int) -> str:
    return sha256_of(path)


@lru_cache(maxsize=512)
def _not_finite_in(path: str, size: int, changed: int) -> list[str]:
    with safe_open(path, "pt") as file:
        return not_finite((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # torch has no isfinite for 8 bits
    return bool(torch.isfinite(wide).all())


def _version(path: Path) -> tuple[str, int, int]:
    """A file as it is now: another size or time is another file."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns
