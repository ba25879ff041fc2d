"""A checkpoint's tensors, read one by one: of a folder (safetensors, in one file or in shards) or of one file."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from braidlm.core.differences import bullet_list, compare_shapes
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.integrity import not_finite, not_finite_error
from braidlm.core.reading import read_json

Shapes = dict[str, tuple[int, ...]]

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Plain floating point types, as safetensors and as torch names them."""
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STATE_DICT_KEYS = ("model_state_dict", "state_dict", "model")
"""The keys under which training scripts save a model's state dict beside other things."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that has not been read yet."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, where it is plain floating point."""
    read: Callable[[], Tensor]


class Checkpoint:
    """The tensors of a folder or file by name; of safetensors only the headers are read before a tensor is needed."""

    def __init__(self, path: Path):
        self.files = _weight_files(path) if path.is_dir() else [path]
        self.stored: dict[str, StoredTensor] = {}
        for file in self.files:
            self.stored |= _safetensors(file) if file.suffix == ".safetensors" else _torch_file(file)
        self.ignored: dict[str, str] = {}
        """Names of tensors that are not read, and what they are."""

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Give every tensor another name."""
        renamed: dict[str, StoredTensor] = {}
        for name, tensor in self.stored.items():
            if renamed.setdefault(new_name(name), tensor) is not tensor:
                raise BraidError(f"two tensors are called '{new_name(name)}'", str(self.files[0]))
        self.stored = renamed

    def ignore(self, name: str, why: str) -> None:
        """Leave a tensor out."""
        del self.stored[name]
        self.ignored[name] = why

    def ignore_copy_of_embedding(self, head: str, embedding: str) -> bool:
        """Leave out a stored head that equals the embedding it is tied to; whether it was left out."""
        if equal := torch.equal(self.read(head), self.read(embedding)):
            self.ignore(head, "a second copy of the embedding, to which it is tied")
        return equal

    @property
    def shapes(self) -> Shapes:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    @property
    def dtypes(self) -> list[str]:
        """The types that occur in it."""
        return sorted({tensor.dtype for tensor in self.stored.values()})

    def check(self, expected: Shapes, description: str, path: Path) -> None:
        """Refuse tensors that are not exactly these, of plain floating point numbers."""
        problems = compare_shapes(expected, self.shapes)
        problems += [
            f"{name} is of type {tensor.dtype}, not a plain floating point type"
            for name, tensor in self.stored.items()
            if tensor.dtype not in FLOATS.values()
        ]
        if problems:
            what = f"the weights are not those of {description}:{bullet_list(problems)}"
            raise BraidError(what, str(path), "Weights and configuration must come from the same model.")

    def read(self, name: str) -> Tensor:
        """One tensor, of finite numbers."""
        tensor = self.stored[name].read()
        if not_finite([(name, tensor)]):
            raise not_finite_error([name], str(self.files[0].parent))
        return tensor

    def hashes(self) -> list[dict[str, str]]:
        """The files of the weights with their SHA-256, for the lineage."""
        return [{"file": path.name, "sha256": sha256_of(path)} for path in self.files]


def _safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        file = safe_open(path, "pt")
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BraidError(f"this file is damaged ({error})", str(path), "Download or copy it again.") from error
    return {
        name: StoredTensor(tuple(view.get_shape()), FLOATS.get(kind, kind), partial(file.get_tensor, name))
        for name, view in views.items()
        for kind in [view.get_dtype()]
    }


def _torch_file(path: Path) -> dict[str, StoredTensor]:
    """The state dict in a file that `torch.save` wrote: the whole file, or what is under a key beside other things."""
    data = _load_torch_file(path)
    parts = {None: data, **data} if isinstance(data, dict) else {}
    filled = {key: part for key, part in parts.items() if isinstance(part, dict) and part}
    found = {
        key: part
        for key, part in filled.items()
        if all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in part.items())
    }
    known = [key for key in (None, *STATE_DICT_KEYS) if key in found] or (list(found) if len(found) == 1 else [])
    if not known:
        contents = f"one {type(data).__name__}"
        if isinstance(data, dict):
            named = [f"'{name}' ({type(value).__name__})" for name, value in data.items()]
            contents = ", ".join(named[:12]) or "nothing"
        what = f"which tensors are the model's is not clear in this file: it holds {contents}"
        raise BraidError(what, str(path), f"Save the model's state dict alone, or under '{STATE_DICT_KEYS[0]}'.")
    # Reading makes a copy, because tensors of one file may share memory.
    return {
        name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.detach().clone)
        for name, tensor in found[known[0]].items()
    }


def _load_torch_file(path: Path) -> Any:
    """The contents of a file, loaded without running code that it may contain."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"objects other than tensors ({match[1]})" if match else "what torch cannot open safely"
        raise BraidError(
            f"this pickle holds {what}, which may run any code when opened; Braid does not open it",
            str(path),
            "If you trust it, save its state dict alone: python -c \"import torch; s = torch.load('FILE', "
            f"weights_only=False); torch.save(s['{STATE_DICT_KEYS[0]}'], 'NEW_FILE')\"",
        ) from error
    except Exception as error:  # torch raises errors of many kinds for files that it cannot read
        first = " ".join(str(error).split()).split(". ")[0]
        why = f"{type(error).__name__}: {first}" if first else type(error).__name__
        what = f"this file is damaged, or torch.save did not write it ({why})"
        raise BraidError(what, str(path), "Download or copy it again.") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
            raise BraidError("this index has no weight_map", str(index))
        names = sorted(set(listed.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise BraidError(f"this index lists a file that is not in the folder: {outside[0]!r}", str(index))
        paths = [folder / name for name in names]
        if missing := [path.name for path in paths if not path.is_file()]:
            what = f"of {len(paths)} files of weights {len(missing)} are not there: {', '.join(missing)}"
            raise BraidError(what, str(folder), "Download or copy them again.")
        return paths
    if pickles := sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern)):
        raise BraidError(
            f"the weights are a pickle ({pickles[0]}), which may run any code when opened; Braid does not open it",
            str(folder),
            'If you trust it, rewrite it as safetensors first: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\"",
        )
    raise BraidError(f"there are no weights here (neither {SINGLE_FILE} nor {INDEX_FILE})", str(folder))
