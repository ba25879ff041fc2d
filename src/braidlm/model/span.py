"""The facts of one forward pass that every block shares: positions, what may be attended to, the cache."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .attention.positions import Positions, Rotation


class KeyValueCache(Protocol):
    """What attention needs of a cache; transformers' caches and our own have it."""

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]: ...

    def get_seq_length(self) -> int: ...


@dataclass
class Span:
    """One forward pass over [batch, time] tokens."""

    positions: Tensor
    """[batch or 1, time]."""
    masks: dict[int | None, Tensor | None]
    """For each attention window in use: what may be attended to, [batch or 1, 1, time, keys]; None = see `causal`."""
    causal: bool
    """Where there is no mask: whether kernels apply the causal one themselves (else everything may be attended to)."""
    cache: KeyValueCache | None = None
    rotations: dict[int, Rotation | None] = field(default_factory=dict)
    """By head size."""
    present: Tensor | None = None
    """[member, batch, time]: which tokens exist for each path or expert, where not all do for all."""

    @property
    def time(self) -> int:
        return self.positions.shape[-1]


def positions_from_mask(mask: Tensor, time: int) -> Tensor:
    """Positions count real tokens, so that padding on either side changes nothing."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -time:]


def make_masks(
    windows: Iterable[int | None],
    time: int,
    past: int,
    padding: Tensor | None,
    device: torch.device,
) -> dict[int | None, Tensor | None]:
    """A mask for each attention window in use, or None where the kernel needs none.

    `padding` is [batch, past + time], true for real tokens.
    """
    return {window: _mask(window, time, past, padding, device) for window in windows}


def _mask(window: int | None, time: int, past: int, padding: Tensor | None, device: torch.device) -> Tensor | None:
    keys = past + time
    inside = window is None or keys <= window
    if padding is None and inside and (past == 0 or time == 1):
        return None
    query = torch.arange(past, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    allowed = key <= query
    if not inside:
        allowed &= key > query - window  # type: ignore[operator]
    allowed = allowed[None, None]
    if padding is not None:
        # A padded row still sees itself: a row with nothing to attend to would be NaN and spread.
        allowed = (allowed & padding[:, None, None, :].bool()) | (key == query)[None, None]
    return allowed


def rotations_for(
    sizes: Iterable[int], part: Positions, positions: Tensor, dtype: torch.dtype
) -> dict[int, Rotation | None]:
    """The rotation for each head size in use, made once for all blocks."""
    return {size: part.rotation(size, positions, dtype) for size in sizes}
