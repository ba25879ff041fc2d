"""Transformer-XL's memory: keys and values of the chunks before, which the tokens of a row's next chunk attend to.

A memory is a value: a step reads one and makes the next. No gradient flows into it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braidlm.core.differences import compare_shapes, listed
from braidlm.core.errors import BraidError
from braidlm.model.attention.attention import ABSENT
from braidlm.model.modeling_braid import BraidForCausalLM, BraidModel
from braidlm.model.span import make_masks


class Memory(NamedTuple):
    """What each row remembers of its text. The shapes never change, so that a step can be compiled and replayed."""

    keys: tuple[Tensor, ...]
    """For each attention [row, head, memory, dim], the latest last, rotated as tokens before the next chunk are."""
    values: tuple[Tensor, ...]
    filled: Tensor
    """[row]: how many of the last entries there are; the others are hidden."""

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def split(self, parts: int) -> list["Memory"]:
        """Views of the rows of each micro-batch."""
        keys, values = (zip(*(x.chunk(parts) for x in layers), strict=True) for layers in (self.keys, self.values))
        return [Memory(*rows) for rows in zip(keys, values, self.filled.chunk(parts), strict=True)]

    def copy_from(self, other: "Memory") -> None:
        """Take the content of another memory; the tensors stay where they are, as a replayed step needs them."""
        torch._foreach_copy_([*self.tensors().values()], [*other.tensors().values()])

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a saved state."""
        named = {f"{slot}.key": key for slot, key in enumerate(self.keys)}
        return named | {f"{slot}.value": value for slot, value in enumerate(self.values)} | {"filled": self.filled}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take the content of a saved state."""
        own = self.tensors()
        shapes, found = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (own, saved))
        if problems := compare_shapes(shapes, found):
            raise ValueError(f"its memory is of another model or batch ({listed(problems)})")
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def empty_memory(
    model: BraidForCausalLM, length: int, rows: int, device: torch.device, dtype: torch.dtype
) -> Memory | None:
    """A memory of `length` tokens in which there is nothing yet; None for a length of 0."""
    body = model.model
    if length == 0 or not body.attentions:
        return None
    check_positions(model)
    keys = tuple(torch.zeros(rows, heads, length, dim, device=device, dtype=dtype) for heads, dim in body.cache_shapes)
    return Memory(keys, tuple(map(torch.zeros_like, keys)), torch.zeros(rows, dtype=torch.long, device=device))


def check_positions(model: BraidForCausalLM) -> None:
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

    def span_options(self, body: BraidModel, time: int) -> dict[str, Any]:
        """The options of the span of a pass over `time` tokens, in which a row sees what is there of its memory."""
        past, device = self.memory.length, self.filled.device
        # One position for all rows, also for those that begin: only distances count.
        positions = torch.arange(past, past + time, device=device)[None]
        there = torch.arange(past, 0, -1, device=device) <= self.filled[:, None]
        visible = torch.cat((there, there.new_ones(len(there), time)), dim=1)
        masks = make_masks(body.windows, time, past, visible, device)
        return {"position_ids": positions, "cache": self, "masks": masks}

    @torch.no_grad()
    def after(self, body: BraidModel, time: int) -> Memory:
        """The memory for the chunk after this one, which had `time` tokens."""
        rotated = self.keys[: len(body.attentions)]  # behind them stands what a head has read
        moved = (body.positions.moved_back(key, time) for key in rotated)
        # The mark of keys that a member does not see is no key that could be rotated.
        keys = [torch.where(key == ABSENT, key, new) for key, new in zip(rotated, moved, strict=True)]
        return Memory(
            (*keys, *self.keys[len(keys) :]), tuple(self.values), (self.filled + time).clamp_max(self.memory.length)
        )
