"""The permutation that sorts tokens by expert: a counting sort in two small kernels.

Each expert's rows begin at a multiple of a tile, so that a tile of rows has one expert. Only the device knows how many
rows an expert has; shapes are upper bounds, so that the host never waits for the device.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton

TILE = 128
"""The maximum of rows in a block of a grouped product."""
CHUNKS, MIN_CHUNK, MAX_CHUNK, ELEMENTS = 128, 16, 512, 8192
"""The target number of chunks of tokens, the limits of their size, and the maximum of their tokens times experts."""


@dataclass(frozen=True)
class Permutation:
    """N tokens dispatched to K of E experts each, as R rows: sorted by expert, then by token, padded to tiles.

    R is an upper bound; nothing beyond the last used tile is ever read.
    """

    source: Tensor
    """int32 [R]: the token of each row, -1 for padding."""
    row_of_choice: Tensor
    """int32 [N, K]: the row of each token's k-th choice."""
    tile_expert: Tensor
    """int32 [R / tile]: the expert of each tile, -1 beyond the last used one."""
    sequence_offsets: Tensor
    """int32 [E, B + 1]: the first row of each expert and sequence; the last is the end of the expert's real rows."""
    expert_offsets: Tensor
    """int32 [E + 1]: the first row of each expert's tiles; the last is the end of the last used tile."""
    routed: Tensor
    """uint8 [N, E]: whether a token goes to an expert."""
    tile: int

    @property
    def rows(self) -> int:
        return len(self.source)

    @property
    def experts(self) -> int:
        return self.routed.shape[1]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What the gradients of experts' parameters read."""
        return self.expert_offsets, self.source, self.row_of_choice, self.tile_expert


def row_bound(tokens: int, choices: int, experts: int, tile: int) -> int:
    """The upper bound of rows, with the padding of every expert."""
    return tile * triton.cdiv(tokens * choices + experts * (tile - 1), tile)


@triton.jit
def _tokens_of(chunk, length, parts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of a chunk, which is a part of one sequence, and their mask."""
    position = chunk % parts * CHUNK + tl.arange(0, CHUNK)
    return chunk // parts * length + position, position < length


@triton.jit
def _one_hot(  # type: ignore[no-untyped-def]
    chosen, token, mask, CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    expert = tl.arange(0, EXPERTS)[None, :]
    routed = tl.zeros([CHUNK, EXPERTS], tl.int32)
    for choice in tl.static_range(CHOICES):
        chosen_expert = tl.load(chosen + token * CHOICES + choice, mask=mask, other=-1).to(tl.int32)
        routed += (chosen_expert[:, None] == expert).to(tl.int32)
    return routed


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    chosen, counts, routed_to, length, parts, experts,
    CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    token, mask = _tokens_of(chunk, length, parts, CHUNK)
    routed = _one_hot(chosen, token, mask, CHOICES, CHUNK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + chunk * EXPERTS + expert, tl.sum(routed, 0))
    routed_mask = mask[:, None] & (expert < experts)[None, :]
    tl.store(routed_to + token[:, None] * experts + expert[None, :], routed.to(tl.uint8), mask=routed_mask)


@triton.jit
def _scatter_rows(  # type: ignore[no-untyped-def]
    chosen, counts, source, row_of_choice, tile_expert, sequence_offsets, expert_offsets, length, parts, experts,
    chunks, tiles,
    CHOICES: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    expert_mask = expert < experts
    before = tl.zeros([EXPERTS], tl.int32)
    count = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, chunks, COUNTS):
        other = (begin + tl.arange(0, COUNTS))[:, None]
        chunk_counts = tl.load(counts + other * EXPERTS + expert[None, :], mask=other < chunks, other=0)
        count += tl.sum(chunk_counts, 0)
        before += tl.sum(tl.where(other < chunk, chunk_counts, 0), 0)
    padded = (count + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, 0)
    start = end - padded
    begin_here = start + before

    token, mask = _tokens_of(chunk, length, parts, CHUNK)
    routed = _one_hot(chosen, token, mask, CHOICES, CHUNK, EXPERTS)
    row = begin_here[None, :] + tl.cumsum(routed, 0) - routed
    for choice in tl.static_range(CHOICES):
        chosen_expert = tl.load(chosen + token * CHOICES + choice, mask=mask, other=-1).to(tl.int32)
        own_row = tl.sum(tl.where(chosen_expert[:, None] == expert[None, :], row, 0), 1)
        tl.store(row_of_choice + token * CHOICES + choice, own_row, mask=mask)
        tl.store(source + own_row, token, mask=mask)

    sequences = chunks // parts
    sequence_offsets += expert * (sequences + 1)
    if chunk % parts == 0:
        tl.store(sequence_offsets + chunk // parts, begin_here, mask=expert_mask)
    if chunk == 0:
        tl.store(sequence_offsets + sequences, start + count, mask=expert_mask)
        tl.store(expert_offsets + expert + 1, end, mask=expert_mask)
        tl.store(expert_offsets, 0)

    for tile in range(chunk, tiles, tl.num_programs(0)):
        owns = (start <= tile * TILE) & (tile * TILE < end)
        tl.store(tile_expert + tile, tl.sum(tl.where(owns, expert + 1, 0), 0) - 1)
        real_end = tl.sum(tl.where(owns, start + count, 0), 0)
        position = tile * TILE + tl.arange(0, TILE)
        tl.store(source + position, tl.full([TILE], -1, tl.int32), mask=position >= real_end)


def permute(chosen_NK: Tensor, experts: int, batch: int, tile: int = TILE) -> Permutation:
    """The permutation of tokens that each chose K different experts, in `batch` sequences of equal length."""
    (tokens, choices), device = chosen_NK.shape, chosen_NK.device
    length, padded_experts = tokens // batch, triton.next_power_of_2(experts)
    assert length * batch == tokens
    chunk = min(
        max(triton.next_power_of_2(triton.cdiv(tokens, CHUNKS)), MIN_CHUNK), MAX_CHUNK, ELEMENTS // padded_experts
    )
    parts = triton.cdiv(length, chunk)
    chunks, rows = batch * parts, row_bound(tokens, choices, experts, tile)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    permutation = Permutation(
        source=empty(rows),
        row_of_choice=empty(tokens, choices),
        tile_expert=empty(rows // tile),
        sequence_offsets=empty(experts, batch + 1),
        expert_offsets=empty(experts + 1),
        routed=empty(tokens, experts, dtype=torch.uint8),
        tile=tile,
    )
    chosen, counts = chosen_NK.contiguous(), empty(chunks, padded_experts)
    _count[(chunks,)](chosen, counts, permutation.routed, length, parts, experts, choices, chunk, padded_experts)
    _scatter_rows[(chunks,)](
        chosen, counts, permutation.source, permutation.row_of_choice, permutation.tile_expert,
        permutation.sequence_offsets, permutation.expert_offsets, length, parts, experts, chunks, rows // tile,
        choices, chunk, padded_experts, CHUNKS, tile,
    )  # fmt: skip
    return permutation


def plain_permute(chosen_NK: Tensor, experts: int, batch: int, tile: int = TILE) -> Permutation:
    """The reference, in torch's operations."""
    (tokens, choices), device = chosen_NK.shape, chosen_NK.device
    rows, chosen = row_bound(tokens, choices, experts, tile), chosen_NK.long().flatten()
    counts_E = chosen.bincount(minlength=experts)
    padded_E = (counts_E + tile - 1) // tile * tile
    expert_offsets = F.pad(padded_E.cumsum(0), (1, 0))
    order = chosen.argsort(stable=True)
    shift_E = expert_offsets[:-1] - (counts_E.cumsum(0) - counts_E)
    row_of_choice = torch.empty_like(chosen)
    row_of_choice[order] = torch.arange(len(order), device=device) + shift_E[chosen[order]]
    source = torch.full((rows,), -1, device=device)
    source[row_of_choice] = torch.arange(len(order), device=device) // choices
    tile_expert = torch.full((rows // tile,), -1, device=device)
    owners = torch.arange(experts, device=device).repeat_interleave(padded_E // tile)
    tile_expert[: len(owners)] = owners
    routed = torch.zeros(tokens, experts, dtype=torch.uint8, device=device).scatter_(1, chosen.view_as(chosen_NK), 1)
    counts_EB = routed.view(batch, -1, experts).sum(1, dtype=torch.long).t()
    sequence_offsets = expert_offsets[:-1, None] + F.pad(counts_EB.cumsum(1), (1, 0))
    row_of_choice = row_of_choice.view_as(chosen_NK)
    return Permutation(
        source.int(), row_of_choice.int(), tile_expert.int(), sequence_offsets.int(), expert_offsets.int(), routed, tile
    )
