"""The weights of a folder of transformers, written shard by shard: a model need not be in memory to be written."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from braidlm.bridges.checkpoint import INDEX_FILE
from braidlm.core import console
from braidlm.core.files import write_json

SHARD_BYTES = 2_000_000_000
"""Of one file at most, unless a tensor alone is larger; safetensors holds a shard twice while it writes."""


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], max_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors that `tensors` describes on the meta device; `read` gives each when its turn comes."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_bytes)
    done = 0
    with console.progress("weights", len(tensors), "tensors") as advance:
        for file, names in split.filename_to_tensors.items():
            # Copies, because safetensors refuses tensors that share memory.
            shard = {name: read(name).clone(memory_format=torch.contiguous_format) for name in names}
            save_file(shard, folder / file, metadata={"format": "pt"})
            done += len(names)
            advance(done, file)
    if split.is_sharded:
        write_json(folder / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
