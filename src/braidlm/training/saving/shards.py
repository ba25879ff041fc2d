"""Tensors that are spread over processes, in files: torch.distributed.checkpoint in safetensors, without any pickle.

Each process writes the parts that it holds, `shard-RANK-...safetensors`, in whose header stands where in the whole
tensor a part belongs. Any number of processes reads them, each what it holds then. An ordinary safetensors file is read
likewise, as one part.
"""

import contextlib
import json
import shutil
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

KEPT, TEMPORARY = 1, 2
"""Numbers of the files that a process writes: state, and weights that go into one file of the model folder."""
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls the types."""


def start_writing(folder: Path, tensors: dict[str, Tensor], weights: Collection[str], group: Any) -> Future:
    """Copy this process's parts and write them while training goes on; done where every process has written its own."""
    files = {name: TEMPORARY if name in weights else KEPT for name in tensors}
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch deprecates inside of its own code
        return dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)  # type: ignore[return-value]


def finished(writing: Future) -> None:
    """Return when all is written; what a process could not write is an error of that process's kind."""
    try:
        writing.result()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


@contextlib.contextmanager
def weights_apart(folder: Path) -> Iterator[Path]:
    """Inside of the block the files of weights are in a folder of their own, and behind it they are gone."""
    apart = folder.with_name("weights")
    apart.mkdir()
    for file in folder.glob(f"*-{TEMPORARY:05d}-of-*.safetensors"):
        file.rename(apart / file.name)
    yield apart
    shutil.rmtree(apart)


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads the headers once."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.found = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.found


class Shards(Mapping[str, Tensor]):
    """The whole tensors of a folder, each read when it is asked for."""

    def __init__(self, folder: Path):
        self.reader = _Reader(folder)
        self.found: dict[str, TensorStorageMetadata] = self.reader.found.state_dict_metadata  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Tensor:
        found = self.found[name]
        whole = torch.empty(found.size, dtype=found.properties.dtype)
        self.fill({name: whole})
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into these tensors, of each the part that this process holds."""
        for name, tensor in tensors.items():
            if tuple(self.found[name].size) != tuple(tensor.shape):
                there, here = tuple(self.found[name].size), tuple(tensor.shape)
                raise ValueError(f"it is of another model ({name} is {there} there, and {here} here)")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # no process waits for another, which torch warns of
            dcp.load({**tensors}, storage_reader=self.reader, no_dist=True)


def write_whole(folder: Path, out: Path) -> None:
    """Write the tensors of a folder's shards into one file; one tensor after another is whole in memory."""
    shards = Shards(folder)
    ordered = sorted(shards, key=lambda name: (-shards.found[name].properties.dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        size, dtype = shards.found[name].size, shards.found[name].properties.dtype
        begin, end = end, end + prod(size) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in ordered:
            file.write(shards[name].contiguous().flatten().view(torch.uint8).numpy().data)
