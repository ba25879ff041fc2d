"""Whether a file of weights is the one that was saved, and holds numbers only; each file is read once a process."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from braidlm.core.differences import listed
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.runs import MODEL_CONFIGS
from braidlm.core.reading import read_json
from braidlm.model.config.braid_config import SERVED

ALLOW_CHANGED = "BRAID_ALLOW_CHANGED_WEIGHTS"
"""The environment variable that lets weights differ from what their lineage records."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
HASHED_FILES = (*WEIGHT_FILES, *MODEL_CONFIGS, "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
"""The files that determine a model's scores."""


@contextmanager
def opened_weights(path: Path) -> Iterator[Any]:
    """A file of safetensors, opened; an error if it is missing or damaged."""
    if not path.is_file():
        raise BraidError(f"the folder has no {path.name}", str(path.parent))
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise BraidError(f"{path.name} is damaged ({error})", str(path.parent), "Use another copy.") from error


def check_hash(path: Path, lineage: Mapping[str, Any] | None) -> None:
    """Refuse weights other than the lineage beside them names, if it names some."""
    weights = (lineage or {}).get("weights")
    if not isinstance(weights, dict) or os.environ.get(ALLOW_CHANGED) == "1":
        return
    if isinstance(files := weights.get("files"), dict):
        recorded = files.get(path.name)
    else:
        recorded = weights.get("sha256") if weights.get("file") == path.name else None
    if recorded is not None and file_sha256(path) != recorded:
        what = f"{path.name} is not the file that lineage.json records (another SHA-256): it was damaged or changed"
        todo = f"Use another copy. If it was changed on purpose, set {ALLOW_CHANGED}=1, or save the model anew."
        raise BraidError(what, str(path.parent), todo)


def _once(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A function that reads a file once a process; a file of another size or time is another file."""

    @lru_cache(maxsize=512)
    def read_version(path: Path, size: int, changed: int) -> Any:
        return read(path)

    def read_once(path: Path) -> Any:
        status = path.stat()
        return read_version(path.resolve(), status.st_size, status.st_mtime_ns)

    return read_once


@_once
def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, which is read once a process."""
    return sha256_of(path)


@_once
def _config_sha256(path: Path) -> str:
    """The SHA-256 of a configuration as versions wrote it that said nothing of other libraries' attention."""
    data = read_json(path)
    if data.pop(SERVED, None) is None:
        return file_sha256(path)
    return hashlib.sha256((json.dumps(data, indent=2, sort_keys=True) + "\n").encode()).hexdigest()


@_once
def _not_finite_in(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return not_finite((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def check_finite(path: Path) -> None:
    """Refuse weights that are not numbers: one of them makes every prediction meaningless, and none says so."""
    if names := _not_finite_in(path):
        raise not_finite_error(names, str(path.parent))


def model_hash(folder: Path, patterns: Sequence[str] = HASHED_FILES) -> str:
    """SHA-256 over all files that determine the model's scores, or over files of other patterns."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    hashes = (_config_sha256(path) if path.name in MODEL_CONFIGS else file_sha256(path) for path in paths)
    return hashlib.sha256("".join(f"{p.name} {h}\n" for p, h in zip(paths, hashes, strict=True)).encode()).hexdigest()


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors that hold NaN or infinity."""
    numbers = ((name, tensor) for name, tensor in tensors if tensor.is_floating_point())
    # Torch has no isfinite for 8 bits.
    wide = ((name, tensor if tensor.element_size() > 1 else tensor.float()) for name, tensor in numbers)
    return [name for name, tensor in wide if not bool(torch.isfinite(tensor).all())]


def not_finite_error(names: list[str], where: str) -> BraidError:
    """The error for weights that hold NaN or infinity."""
    todo = "Use an earlier checkpoint; training that diverged needs a smaller learning rate or a longer warmup."
    return BraidError(f"weights are not finite (NaN or infinite): {listed(names)}", where, todo)
