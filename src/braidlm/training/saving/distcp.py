"""Reads the states that earlier versions wrote with torch.distributed.checkpoint, without running what is in them.

The list of tensors, `.metadata`, is a pickle, and torch's own reader would run any code that somebody put there. Here
every class in it is replaced by a record that only keeps its fields, and only the classes of the list itself are
admitted. The tensors are read by `torch.load(weights_only=True)`, which admits tensors alone.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EARLIER_FORMAT = "tensors"
"""The folder of such a state."""
METADATA = ".metadata"
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
VALUES = {("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


class Record:
    """Stands for an object of any admitted class; calling, setting and comparing it does nothing."""

    def __init__(self, *values: Any):
        self.values = values
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


class MetadataReader(pickle.Unpickler):
    """Makes records in place of objects, and refuses every name that does not belong to the list of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in MODULES or (module, name) in VALUES or is_type:
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a state and was not run")


def read_distcp(folder: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names begin with one of `prefixes`."""
    try:
        with open(folder / METADATA, "rb") as file:
            entries = MetadataReader(file).load().fields["storage_data"]
        where = {index.fields["fqn"]: entry.fields for index, entry in entries.items()}
        names = [name for name in where if name.startswith(prefixes)]
        return {name: _read_tensor(folder, **_file_and_range(where[name])) for name in names}
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from error


def _file_and_range(entry: dict[str, Any]) -> dict[str, Any]:
    name, offset, length = str(entry["relative_path"]), int(entry["offset"]), int(entry["length"])
    if Path(name).name != name:
        raise ValueError(f"it names a file of another folder ({name})")
    return {"name": name, "offset": offset, "length": length}


def _read_tensor(folder: Path, name: str, offset: int, length: int) -> Tensor:
    with open(folder / name, "rb") as file:
        file.seek(offset)
        tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} holds something else than a tensor")
    return tensor
