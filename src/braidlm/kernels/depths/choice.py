"""Which tokens of each row of the batch enter a block: those with the highest scores, by one small kernel.

A sort would need several. The score that is just high enough is found bit by bit: after each pass over the row one
more bit of it is known.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton

BITS = 32
ELEMENTS, MAX_WARPS = 128, 16
"""Tokens for each warp."""


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores, index, places, time, count, BITS: tl.constexpr, TIME: tl.constexpr
):
    row = tl.program_id(0)
    token = tl.arange(0, TIME)
    mask = token < time
    bits = tl.load(scores + row * time + token, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    # Integers in the order of the scores: the bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(mask, key, -2147483648)
    lowest = tl.full([], -2147483648, tl.int64)
    for step in range(BITS):
        candidate = lowest + (tl.full([], 1, tl.int64) << (BITS - 1 - step))
        lowest = tl.where(tl.sum((key >= candidate.to(tl.int32)).to(tl.int32), 0) >= count, candidate, lowest)
    higher, tied = key > lowest.to(tl.int32), (key == lowest.to(tl.int32)) & mask
    room = count - tl.sum(higher.to(tl.int32), 0)
    entered = higher | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    place = row * count + tl.cumsum(entered.to(tl.int32), 0) - 1
    tl.store(index + place, token.to(tl.int64), mask=entered)
    tl.store(places + row * time + token, tl.where(entered, place, -1), mask=mask)


class Choice(NamedTuple):
    """The tokens that enter, in their order."""

    index_BK: Tensor
    """Their positions in their rows."""
    place_BT: Tensor
    """Of every token, its place among all that enter, or -1."""


def choose_tokens(score_BT: Tensor, count: int) -> Choice:
    """The `count` tokens of each row with the highest float32 scores; of equal ones the earlier."""
    batch, time = score_BT.shape
    index = torch.empty(batch, count, dtype=torch.int64, device=score_BT.device)
    places = torch.empty(batch, time, dtype=torch.int32, device=score_BT.device)
    padded = triton.next_power_of_2(time)
    warps = max(1, min(MAX_WARPS, padded // ELEMENTS))
    _choose[(batch,)](score_BT, index, places, time, count, BITS, padded, num_warps=warps)
    return Choice(index, places)


def plain_choose_tokens(score_BT: Tensor, count: int) -> Choice:
    """The reference, in torch's operations."""
    index_BK = score_BT.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    place_BK = torch.arange(index_BK.numel(), dtype=torch.int32, device=index_BK.device).view_as(index_BK)
    nowhere = torch.full_like(score_BT, -1, dtype=torch.int32)
    return Choice(index_BK, nowhere.scatter(1, index_BK, place_BK))
