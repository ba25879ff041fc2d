"""Causal attention of those queries of each sequence that are there, on a CPU: the others cost nothing.

`F.scaled_dot_product_attention` with a mask remains the reference and serves everywhere else.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..routing.dispatch import Permutation

CHUNK = 64
"""Queries computed at once: their scores stay in the processor's cache, and keys after the last are left out."""
MIN_LENGTH = 128
"""In shorter sequences there is little to leave out, and one call for all costs less than many."""


class QueryChunk(NamedTuple):
    """Some rows of one sequence of one member."""

    sequence: int
    """Sequences of the first member come first, then those of the second."""
    rows: slice
    first: int
    """Position of the first row in its sequence."""
    last: int


def supports_compact_attention(query: Tensor, time: int) -> bool:
    """Whether it is worth it, and is computed as exactly as the reference."""
    wide = query.dtype in (torch.float32, torch.float64)
    return query.is_cpu and wide and time >= MIN_LENGTH and not torch.compiler.is_compiling()


def compact_attention(query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
    """What each row's query gathers [row, head, dim] from the tokens up to its own in a sequence S of its member."""
    made: Tensor = CompactAttention.apply(query_RNH * query_RNH.shape[-1] ** -0.5, key_STNH, value_STNH, permutation)
    return made


class CompactAttention(torch.autograd.Function):
    """Scores are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
        ctx.positions_R = permutation.source_R % key_STNH.shape[1]
        ctx.pieces = list(_query_chunks(permutation, ctx.positions_R, key_STNH))
        made_RNH = torch.empty_like(query_RNH)
        for piece in ctx.pieces:
            shares = _attention_weights(piece, ctx.positions_R, query_RNH, key_STNH)
            value = value_STNH[piece.sequence, : piece.last + 1].transpose(0, 1)
            made_RNH[piece.rows] = (shares @ value).transpose(0, 1)
        ctx.save_for_backward(query_RNH, key_STNH, value_STNH, made_RNH)
        return made_RNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_RNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_RNH, key_STNH, value_STNH, made_RNH = ctx.saved_tensors
        along_NR = (upstream_RNH * made_RNH).sum(-1, keepdim=True).transpose(0, 1)
        query_gradient = torch.empty_like(query_RNH)
        key_gradient, value_gradient = (torch.zeros_like(key_STNH.transpose(1, 2)).contiguous() for _ in range(2))
        for piece in ctx.pieces:
            seen = slice(piece.last + 1)
            shares = _attention_weights(piece, ctx.positions_R, query_RNH, key_STNH)
            upstream = upstream_RNH[piece.rows].transpose(0, 1)
            key, value = (x[piece.sequence, seen].transpose(0, 1) for x in (key_STNH, value_STNH))
            value_gradient[piece.sequence, :, seen].baddbmm_(shares.mT, upstream)
            scores = (upstream @ value.mT).sub_(along_NR[:, piece.rows]).mul_(shares)
            query_gradient[piece.rows] = (scores @ key).transpose(0, 1)
            query = query_RNH[piece.rows].transpose(0, 1)
            key_gradient[piece.sequence, :, seen].baddbmm_(scores.mT, query)
        return query_gradient, key_gradient.transpose(1, 2), value_gradient.transpose(1, 2), None


def _query_chunks(permutation: Permutation, positions_R: Tensor, key_STNH: Tensor) -> Iterator[QueryChunk]:
    """Rows are sorted by member and then by token, so those of one sequence stand together."""
    sequences, time = key_STNH.shape[:2]
    of_member = sequences // len(permutation.groups.counts_E)
    sequence_R = permutation.expert_R * of_member + permutation.source_R // time
    counts = torch.bincount(sequence_R, minlength=sequences).tolist()
    positions, begin = positions_R.tolist(), 0
    for sequence, count in enumerate(counts):
        for start in range(begin, begin + count, CHUNK):
            end = min(start + CHUNK, begin + count)
            yield QueryChunk(sequence, slice(start, end), positions[start], positions[end - 1])
        begin += count


def _attention_weights(piece: QueryChunk, positions_R: Tensor, query_RNH: Tensor, key_STNH: Tensor) -> Tensor:
    """What each query takes of each key up to the last query's own, [head, row, key]; 0 of those that come after it."""
    scores = query_RNH[piece.rows].transpose(0, 1) @ key_STNH[piece.sequence, : piece.last + 1].permute(1, 2, 0)
    later = torch.arange(piece.first + 1, piece.last + 1) > positions_R[piece.rows, None]
    scores[..., piece.first + 1 :].masked_fill_(later, -torch.inf)
    return scores.softmax(-1)
