"""A Hugging Face checkpoint folder: its configuration and its safetensors, whole or in shards, read one by one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from braidlm.bridges.bridge import Bridge, Shapes
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, sha256_of

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and what it is."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a folder by their full names; only headers are read before a tensor is asked for."""

    def __init__(self, folder: Path, bridge: Bridge):
        self.folder = folder
        self.files = _weight_files(folder)
        stored: dict[str, Stored] = {}
        for path in self.files:
            try:
                file = safe_open(path, "pt")
                for name in file.keys():  # noqa: SIM118
                    view = file.get_slice(name)
                    stored[name] = Stored(file, name, tuple(view.get_shape()), view.get_dtype())
            except SafetensorError as error:
                raise BraidError(f"this file is damaged ({error})", str(path), "Download or copy it again.") from error
        if not any(name.startswith(bridge.body) for name in stored):  # saved without its head
            stored = {n if n == bridge.head else bridge.body + n: tensor for n, tensor in stored.items()}
        self.ignored = {name: why for name in stored if (why := bridge.why_ignorable(name))}
        self.stored = {name: tensor for name, tensor in stored.items() if name not in self.ignored}

    @property
    def shapes(self) -> Shapes:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    @property
    def dtypes(self) -> list[str]:
        """The kinds of number in it, as torch names them where they are floating point."""
        return sorted({FLOATS.get(tensor.dtype, tensor.dtype) for tensor in self.stored.values()})

    def dtype_problems(self) -> list[str]:
        """Tensors that are not plain floating point numbers."""
        odd = [(name, tensor.dtype) for name, tensor in self.stored.items() if tensor.dtype not in FLOATS]
        return [f"{name} is of type {dtype}, not a plain floating point type" for name, dtype in odd]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self.stored[name]
        return tensor.file.get_tensor(tensor.name)

    def hashes(self) -> list[dict[str, str]]:
        """The files of the weights with their SHA-256, for the lineage."""
        return [{"file": path.name, "sha256": sha256_of(path)} for path in self.files]


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
