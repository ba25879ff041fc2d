"""A checkpoint's tensors, read one by one: of a folder (safetensors, whole or in shards) or of one file."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from braidlm.bridges.torch_files import load_state
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, sha256_of

Shapes = dict[str, tuple[int, ...]]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Plain floating point types, as safetensors and as torch names them."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """What a tensor is, and how it is read."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, where it is plain floating point."""
    read: Callable[[], Tensor]


class Checkpoint:
    """The tensors of a folder or file by their names; of safetensors only headers are read before one is asked for."""

    def __init__(self, place: Path):
        self.files = _weight_files(place) if place.is_dir() else [place]
        self.stored: dict[str, Stored] = {}
        for path in self.files:
            self.stored |= _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
        self.ignored: dict[str, str] = {}
        """Names of tensors that are not to be read, and what they are."""

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Call every tensor by another name."""
        renamed = {new_name(name): tensor for name, tensor in self.stored.items()}
        if len(renamed) < len(self.stored):
            names = [new_name(name) for name in self.stored]
            twice = next(name for name in names if names.count(name) > 1)
            raise BraidError(f"two tensors are called '{twice}'", str(self.files[0]))
        self.stored = renamed

    def ignore(self, name: str, why: str) -> None:
        """Leave a tensor out."""
        del self.stored[name]
        self.ignored[name] = why

    @property
    def shapes(self) -> Shapes:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    @property
    def dtypes(self) -> list[str]:
        """The kinds of number in it."""
        return sorted({tensor.dtype for tensor in self.stored.values()})

    def dtype_problems(self) -> list[str]:
        """Tensors that are not plain floating point numbers."""
        odd = [(name, tensor.dtype) for name, tensor in self.stored.items() if tensor.dtype not in FLOATS.values()]
        return [f"{name} is of type {dtype}, not a plain floating point type" for name, dtype in odd]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self.stored[name].read()

    def hashes(self) -> list[dict[str, str]]:
        """The files of the weights with their SHA-256, for the lineage."""
        return [{"file": path.name, "sha256": sha256_of(path)} for path in self.files]


def _safetensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, "pt")
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BraidError(f"this file is damaged ({error})", str(path), "Download or copy it again.") from error
    return {
        name: Stored(
            tuple(view.get_shape()),
            FLOATS.get(view.get_dtype(), view.get_dtype()),
            partial(file.get_tensor, name),
        )
        for name, view in views.items()
    }


def _torch_file(path: Path) -> dict[str, Stored]:
    return {
        name: Stored(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), partial(_copied, tensor))
        for name, tensor in load_state(path).items()
    }


def _copied(tensor: Tensor) -> Tensor:
    """Apart from other tensors of the file, with which it may share memory."""
    return tensor.detach().clone()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise BraidError("this index has no weight_map", str(folder / INDEX))
        paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
        if absent := [path.name for path in paths if not path.is_file()]:
            raise BraidError(
                f"of {len(paths)} files of weights {len(absent)} are not there: {', '.join(absent)}",
                str(folder),
                "Download or copy them again.",
            )
        return paths
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise BraidError(
            f"the weights are a pickle ({pickles[0]}), which may run any code when opened; Braid does not open it",
            str(folder),
            'If you trust it, rewrite it as safetensors first: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\"",
        )
    raise BraidError(f"there are no weights here (neither {WHOLE} nor {INDEX})", str(folder))
