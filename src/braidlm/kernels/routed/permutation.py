"""Where each token's rows are when rows are sorted by the expert they go to: a counting sort in two small kernels.

Each expert's rows begin at a multiple of a tile, so that a tile of rows has one expert. How many rows an expert has
is known to the device only; every shape is fixed by its upper bound, and the host waits for nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

TILE = 128
"""Rows that a program of a grouped product makes at most."""
CHUNKS, SMALLEST, LARGEST, NUMBERS = 128, 16, 512, 8192
"""Chunks of tokens that are wanted, tokens of a chunk at least and at most, and its tokens times experts at most."""


@dataclass(frozen=True)
class Permutation:
    """N tokens that each go to K of E experts, as R rows: by expert, within an expert by token, with padding between.

    R is an upper bound; what is beyond the last used tile is never read.
    """

    source: Tensor
    """int32 [R]: the token of each row, -1 for padding."""
    row_of_choice: Tensor
    """int32 [N, K]: the row of each token's k-th choice."""
    tile_expert: Tensor
    """int32 [R / tile]: the expert of each tile, -1 beyond the last used one."""
    begins: Tensor
    """int32 [E, B + 1]: where the rows of each expert and sequence begin; the last is the end of its real rows."""
    starts: Tensor
    """int32 [E + 1]: where each expert's tiles begin; the last is the end of the last used tile."""
    routed: Tensor
    """uint8 [N, E]: whether a token goes to an expert."""
    tile: int

    @property
    def rows(self) -> int:
        return len(self.source)

    @property
    def experts(self) -> int:
        return self.routed.shape[1]


def row_bound(tokens: int, choices: int, experts: int, tile: int) -> int:
    """As many rows as there can be, with the padding of every expert."""
    return tile * triton.cdiv(tokens * choices + experts * (tile - 1), tile)


@triton.jit
def _tokens_of(chunk, length, parts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk is a part of one sequence."""
    at = chunk % parts * CHUNK + tl.arange(0, CHUNK)
    return chunk // parts * length + at, at < length


@triton.jit
def _routed(  # type: ignore[no-untyped-def]
    chosen, token, inside, CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    expert = tl.arange(0, EXPERTS)[None, :]
    routed = tl.zeros([CHUNK, EXPERTS], tl.int32)
    for choice in tl.static_range(CHOICES):
        mine = tl.load(chosen + token * CHOICES + choice, mask=inside, other=-1).to(tl.int32)
        routed += (mine[:, None] == expert).to(tl.int32)
    return routed


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    chosen, counts, routed_to, length, parts, experts,
    CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    token, inside = _tokens_of(chunk, length, parts, CHUNK)
    routed = _routed(chosen, token, inside, CHOICES, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + chunk * EXPERTS + expert, tl.sum(routed, 0))
    there = inside[:, None] & (expert < experts)[None, :]
    tl.store(routed_to + token[:, None] * experts + expert[None, :], routed.to(tl.uint8), mask=there)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    chosen, counts, source, slots, tile_expert, begins, starts, length, parts, experts, chunks, tiles,
    CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    real = expert < experts
    before = tl.zeros([EXPERTS], tl.int32)
    count = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, chunks, COUNTS):
        other = (begin + tl.arange(0, COUNTS))[:, None]
        some = tl.load(counts + other * EXPERTS + expert[None, :], mask=other < chunks, other=0)
        count += tl.sum(some, 0)
        before += tl.sum(tl.where(other < chunk, some, 0), 0)
    padded = (count + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, 0)
    start = end - padded
    begin_here = start + before

    token, inside = _tokens_of(chunk, length, parts, CHUNK)
    routed = _routed(chosen, token, inside, CHOICES, CHUNK, EXPERTS)
    row = begin_here[None, :] + tl.cumsum(routed, 0) - routed
    for choice in tl.static_range(CHOICES):
        mine = tl.load(chosen + token * CHOICES + choice, mask=inside, other=-1).to(tl.int32)
        slot = tl.sum(tl.where(mine[:, None] == expert[None, :], row, 0), 1)
        tl.store(slots + token * CHOICES + choice, slot, mask=inside)
        tl.store(source + slot, token, mask=inside)

    sequences = chunks // parts
    begins += expert * (sequences + 1)
    if chunk % parts == 0:
        tl.store(begins + chunk // parts, begin_here, mask=real)
    if chunk == 0:
        tl.store(begins + sequences, start + count, mask=real)
        tl.store(starts + expert + 1, end, mask=real)
        tl.store(starts, 0)

    for tile in range(chunk, tiles, tl.num_programs(0)):
        owns = (start <= tile * TILE) & (tile * TILE < end)
        tl.store(tile_expert + tile, tl.sum(tl.where(owns, expert + 1, 0), 0) - 1)
        real_end = tl.sum(tl.where(owns, start + count, 0), 0)
        at = tile * TILE + tl.arange(0, TILE)
        tl.store(source + at, tl.full([TILE], -1, tl.int32), mask=at >= real_end)


def permute(chosen_NK: Tensor, experts: int, batch: int, tile: int = TILE) -> Permutation:
    """The rows of tokens that each chose K different experts; the tokens are `batch` sequences of equal length."""
    (tokens, choices), device = chosen_NK.shape, chosen_NK.device
    length, wide = tokens // batch, triton.next_power_of_2(experts)
    assert length * batch == tokens
    chunk = min(max(triton.next_power_of_2(triton.cdiv(tokens, CHUNKS)), SMALLEST), LARGEST, NUMBERS // wide)
    parts = triton.cdiv(length, chunk)
    chunks, rows = batch * parts, row_bound(tokens, choices, experts, tile)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = Permutation(
        source=empty(rows),
        row_of_choice=empty(tokens, choices),
        tile_expert=empty(rows // tile),
        begins=empty(experts, batch + 1),
        starts=empty(experts + 1),
        routed=empty(tokens, experts, dtype=torch.uint8),
        tile=tile,
    )
    chosen, counts = chosen_NK.contiguous(), empty(chunks, wide)
    _count[(chunks,)](chosen, counts, made.routed, length, parts, experts, choices, chunk, wide)
    _place[(chunks,)](
        chosen, counts, made.source, made.row_of_choice, made.tile_expert, made.begins, made.starts,
        length, parts, experts, chunks, rows // tile, choices, chunk, wide, CHUNKS, tile,
    )  # fmt: skip
    return made


def plain_permute(chosen_NK: Tensor, experts: int, batch: int, tile: int = TILE) -> Permutation:
    """The reference, in torch's operations."""
    (tokens, choices), device = chosen_NK.shape, chosen_NK.device
    rows, chosen = row_bound(tokens, choices, experts, tile), chosen_NK.long().flatten()
    counts_E = chosen.bincount(minlength=experts)
    padded_E = (counts_E + tile - 1) // tile * tile
    starts = F.pad(padded_E.cumsum(0), (1, 0))
    order = chosen.argsort(stable=True)
    shift_E = starts[:-1] - (counts_E.cumsum(0) - counts_E)
    slots = torch.empty_like(chosen)
    slots[order] = torch.arange(len(order), device=device) + shift_E[chosen[order]]
    source = torch.full((rows,), -1, device=device)
    source[slots] = torch.arange(len(order), device=device) // choices
    tile_expert = torch.full((rows // tile,), -1, device=device)
    owners = torch.arange(experts, device=device).repeat_interleave(padded_E // tile)
    tile_expert[: len(owners)] = owners
    routed = torch.zeros(tokens, experts, dtype=torch.uint8, device=device).scatter_(1, chosen.view_as(chosen_NK), 1)
    counts_EB = routed.view(batch, -1, experts).sum(1, dtype=torch.long).t()
    begins = starts[:-1, None] + F.pad(counts_EB.cumsum(1), (1, 0))
    slots = slots.view_as(chosen_NK)
    return Permutation(source.int(), slots.int(), tile_expert.int(), begins.int(), starts.int(), routed, tile)
