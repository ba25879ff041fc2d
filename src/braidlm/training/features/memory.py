"""Transformer-XL's memory: keys and values of the chunks before, which the tokens of a row's next chunk attend to.

A memory is a value: a step reads one and makes the next. No gradient flows into it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.model.attention.attention import ABSENT
from braidlm.model.config.ranges import Range
from braidlm.model.language_model import Body, LanguageModel
from braidlm.model.span import make_masks
from braidlm.training.features.feature import Feature, Part, Setup, feature


class Memory(NamedTuple):
    """What each row remembers of its text. The shapes never change, so that a step can be compiled and replayed."""

    keys: tuple[Tensor, ...]
    """For each attention [row, head, memory, dim], the latest last, rotated as tokens before the next chunk are."""
    values: tuple[Tensor, ...]
    filled: Tensor  # [row]: how many of the last entries there are; the others are hidden

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def split(self, parts: int) -> list["Memory"]:
        """Views of the rows of each micro-batch."""
        keys, values = (zip(*(x.chunk(parts) for x in layers), strict=True) for layers in (self.keys, self.values))
        return [Memory(*rows) for rows in zip(keys, values, self.filled.chunk(parts), strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for a saved state."""
        named = {f"{slot}.key": key for slot, key in enumerate(self.keys)}
        return named | {f"{slot}.value": value for slot, value in enumerate(self.values)} | {"filled": self.filled}


def empty_memory(
    model: LanguageModel, length: int, rows: int, device: torch.device, dtype: torch.dtype
) -> Memory | None:
    """A memory of `length` tokens in which there is nothing yet; None for a length of 0."""
    body = model.model
    if length == 0 or not body.attentions:
        return None
    check_positions(model)
    keys = tuple(torch.zeros(rows, heads, length, dim, device=device, dtype=dtype) for heads, dim in body.cache_shapes)
    return Memory(keys, tuple(map(torch.zeros_like, keys)), torch.zeros(rows, dtype=torch.long, device=device))


def check_positions(model: LanguageModel) -> None:
    """Refuse a model whose positions have no place for a memory."""
    for head_dim in model.model.head_dims:
        try:
            model.model.positions.moved_back(torch.zeros(1, 1, 1, head_dim), 1)
        except BraidError as error:
            todo = f"{error.todo} training.memory=0 trains without."
            raise BraidError(error.what, "training.memory", todo) from error


class MemoryCache:
    """A memory as the cache of one forward pass over the next chunk of each row."""

    def __init__(self, memory: Memory, continues: Tensor):
        """`continues` [row] is 0 where another text begins, which does not see the memory."""
        self.memory = memory
        self.filled = memory.filled * continues
        self.keys, self.values = list(memory.keys), list(memory.values)

    def get_seq_length(self) -> int:
        return self.memory.length

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        keys = torch.cat((self.memory.keys[slot].to(key.dtype), key), dim=2)
        values = torch.cat((self.memory.values[slot].to(value.dtype), value), dim=2)
        # Activation checkpointing calls this again in the backward pass: it writes the same once more.
        self.keys[slot], self.values[slot] = (x.detach()[:, :, -self.memory.length :] for x in (keys, values))
        return keys, values

    def span_options(self, body: Body, time: int) -> dict[str, Any]:
        """The options of the span of a pass over `time` tokens, in which a row sees what is there of its memory."""
        past, device = self.memory.length, self.filled.device
        # One position for all rows, also for those that begin: only distances count.
        positions = torch.arange(past, past + time, device=device)[None]
        there = torch.arange(past, 0, -1, device=device) <= self.filled[:, None]
        visible = torch.cat((there, there.new_ones(len(there), time)), dim=1)
        masks = make_masks(body.windows, time, past, visible, device)
        return {"position_ids": positions, "cache": self, "masks": masks}

    @torch.no_grad()
    def after(self, body: Body, time: int) -> Memory:
        """The memory for the chunk after this one, which had `time` tokens."""
        rotated = self.keys[: len(body.attentions)]  # behind them stands what a head has read
        moved = (body.positions.moved_back(key, time) for key in rotated)
        # The mark of keys that a member does not see is no key that could be rotated.
        keys = [torch.where(key == ABSENT, key, new) for key, new in zip(rotated, moved, strict=True)]
        return Memory(
            (*keys, *self.keys[len(keys) :]), tuple(self.values), (self.filled + time).clamp_max(self.memory.length)
        )


def memory_length(training: Any, data: DataConfig | None) -> int:
    """How many tokens before its chunk a row attends to."""
    if training.memory is not None or data is None:
        return training.memory or 0
    return data.length if chunkings[data.chunking.kind].keeps_rows else 0


@feature("training.memory")
class ChunkMemory(Feature):
    """The memory of all rows of this process, from step to step."""

    for_decoders = False
    plain_pass = True
    file = "memory-{rank}.safetensors"

    @dataclass
    class Keys:
        memory: Annotated[int, Range(at_least=0, at_most=100_000_000)] | None = None
        """How many tokens before its own chunk a row attends to, as in Transformer-XL: their keys and values are kept
        from the step before, and no gradient flows into them. By default a chunk's length where `data.chunking` is
        `consecutive`, else 0."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.continues = torch.zeros_like(memory.filled)
        """[row]: 1 where the row goes on with its text. A replayed step reads it where it is."""
        self.keeps = True  # whether the next step goes on from what this one leaves
        self.after: list[Memory] = []  # what the rows of each micro-batch remember after the last step

    @classmethod
    def is_asked(cls, training: Any, data: DataConfig | None) -> bool:
        return memory_length(training, data) > 0

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        if training.memory and not chunkings[data.chunking.kind].keeps_rows:
            what = "training.memory: a row has a memory only where it goes on with its text from step to step"
            yield BraidError(what, todo="Add data.chunking=consecutive.")

    @classmethod
    def check_model(cls, model: LanguageModel, training: Any, data: DataConfig) -> None:
        check_positions(model)

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        length, rows = memory_length(setup.training, setup.data), setup.training.batch * setup.training.accumulation
        if not isinstance(setup.model, LanguageModel):
            return []
        memory = empty_memory(setup.model, length, rows, setup.rank.device, setup.dtype)
        if memory is None:
            return []
        plain = "; kernels see one chunk alone, so all layers are plain" if memory.filled.is_cuda else ""
        console.say(f"Each chunk attends to the {memory.length:,} tokens before it{plain}.")
        return [cls(memory)]

    def attended(self, parts: Sequence[Part]) -> Sequence[Part]:
        # A chunk's tokens see half of it on average, and all of the memory.
        return [(share, length + 2 * self.memory.length) for share, length in parts]

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        self.go_on(batch.whole.continues, keeps=batch.is_last_piece)
        return batch

    def go_on(self, continues: np.ndarray, keeps: bool = True) -> None:
        """Say which rows of the next step go on with their text; without `keeps` the step after has them once more."""
        given, self.keeps = torch.from_numpy(continues.astype(np.int64)), keeps
        self.continues.copy_(given.pin_memory() if self.continues.is_cuda else given, non_blocking=True)

    def inputs(self, index: int, parts: int) -> dict[str, Any]:
        if index == 0:
            self.after = []
        return {"memory": self.memory.split(parts)[index], "continues": self.continues.chunk(parts)[index]}

    def read_pass(self, found: Any) -> None:
        self.after.append(found.memory)

    def end_step(self, share: float) -> None:
        if self.keeps:
            for rows, after in zip(self.memory.split(len(self.after)), self.after, strict=True):
                # The tensors stay where they are, as a replayed step needs them.
                torch._foreach_copy_([*rows.tensors().values()], [*after.tensors().values()])

    def state(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        own = self.memory.tensors()
        shapes, found = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (own, saved))
        if problems := compare_shapes(shapes, found):
            raise ValueError(f"its memory is of another model or batch ({listed(problems)})")
        for name, tensor in own.items():
            tensor.copy_(saved[name])
