"""Causal attention on a CPU for some of the queries of each sequence; the others cost nothing.

The reference is `F.scaled_dot_product_attention` with a mask.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.replacing import is_eager_cpu, replaces
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.routing.dispatch import Permutation
from braidlm.model.span import Span

CHUNK = 64
"""Number of queries computed at once: their scores fit in the processor's cache, and later keys are left out."""
MIN_LENGTH = 128
"""In shorter sequences there is little to leave out, and one call for all queries is faster."""


@replaces(SoftmaxAttention, on=("cpu",))
class CpuSoftmaxAttention(SoftmaxAttention):
    """In long sequences the queries of tokens that chose no member cost nothing."""

    def _attend_rows(self, query_RW: Tensor, kv_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        plain = span.causal and span.cache is None and span.masks[self.window] is None and not self.drop.probability
        compact = not (span.eager or span.two_way) and supports_compact_attention(query_RW, span.time)
        if not (plain and compact and self.kv_heads == self.heads):
            return super()._attend_rows(query_RW, kv_MBTW, permutation, span)
        key, value = kv_MBTW.flatten(0, 1).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            key = rotate(key)
            query_STNH = rotate(permutation.scatter_per_expert(query_RW).view_as(key))
            query_RW = permutation.gather_per_expert(query_STNH.reshape(len(kv_MBTW), -1, query_RW.shape[1]))
        return compact_attention(query_RW.unflatten(1, (self.heads, -1)), key, value, permutation).flatten(1)


class QueryChunk(NamedTuple):
    """Rows of one sequence of one member that are computed at once."""

    sequence: int
    """Index of the sequence: those of the first member come first, then those of the second."""
    rows: slice
    first: int
    """Position of the first row in its sequence."""
    last: int
    """Position of the last row in its sequence."""


def supports_compact_attention(query: Tensor, time: int) -> bool:
    """Whether compact attention is faster than the reference and as exact."""
    wide = query.dtype in (torch.float32, torch.float64)
    return wide and time >= MIN_LENGTH and is_eager_cpu(query)


def compact_attention(query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
    """Attention of each row's query [row, head, dim] to the tokens up to its own in its sequence S."""
    output: Tensor = CompactAttention.apply(query_RNH * query_RNH.shape[-1] ** -0.5, key_STNH, value_STNH, permutation)
    return output


class CompactAttention(torch.autograd.Function):
    """The backward pass computes the attention weights again."""

    @staticmethod
    def forward(ctx: Any, query_RNH: Tensor, key_STNH: Tensor, value_STNH: Tensor, permutation: Permutation) -> Tensor:
        ctx.positions_R = permutation.source_R % key_STNH.shape[1]
        ctx.chunks = list(_query_chunks(permutation, ctx.positions_R, key_STNH))
        output_RNH = torch.empty_like(query_RNH)
        for chunk in ctx.chunks:
            weights = _attention_weights(chunk, ctx.positions_R, query_RNH, key_STNH)
            value = value_STNH[chunk.sequence, : chunk.last + 1].transpose(0, 1)
            output_RNH[chunk.rows] = (weights @ value).transpose(0, 1)
        ctx.save_for_backward(query_RNH, key_STNH, value_STNH, output_RNH)
        return output_RNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_RNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_RNH, key_STNH, value_STNH, output_RNH = ctx.saved_tensors
        delta_NR = (upstream_RNH * output_RNH).sum(-1, keepdim=True).transpose(0, 1)
        query_gradient = torch.empty_like(query_RNH)
        key_gradient, value_gradient = (torch.zeros_like(key_STNH.transpose(1, 2)).contiguous() for _ in range(2))
        for chunk in ctx.chunks:
            seen = slice(chunk.last + 1)
            weights = _attention_weights(chunk, ctx.positions_R, query_RNH, key_STNH)
            upstream = upstream_RNH[chunk.rows].transpose(0, 1)
            key, value = (x[chunk.sequence, seen].transpose(0, 1) for x in (key_STNH, value_STNH))
            value_gradient[chunk.sequence, :, seen].baddbmm_(weights.mT, upstream)
            score_gradient = (upstream @ value.mT).sub_(delta_NR[:, chunk.rows]).mul_(weights)
            query_gradient[chunk.rows] = (score_gradient @ key).transpose(0, 1)
            query = query_RNH[chunk.rows].transpose(0, 1)
            key_gradient[chunk.sequence, :, seen].baddbmm_(score_gradient.mT, query)
        return query_gradient, key_gradient.transpose(1, 2), value_gradient.transpose(1, 2), None


def _query_chunks(permutation: Permutation, positions_R: Tensor, key_STNH: Tensor) -> Iterator[QueryChunk]:
    """Rows are sorted by member and then by token, so those of one sequence are contiguous."""
    sequences, time = key_STNH.shape[:2]
    batch = sequences // len(permutation.groups.counts_E)
    sequence_R = permutation.expert_R * batch + permutation.source_R // time
    counts = torch.bincount(sequence_R, minlength=sequences).tolist()
    positions, begin = positions_R.tolist(), 0
    for sequence, count in enumerate(counts):
        for start in range(begin, begin + count, CHUNK):
            end = min(start + CHUNK, begin + count)
            yield QueryChunk(sequence, slice(start, end), positions[start], positions[end - 1])
        begin += count


def _attention_weights(chunk: QueryChunk, positions_R: Tensor, query_RNH: Tensor, key_STNH: Tensor) -> Tensor:
    """The attention weights [head, row, key] of a chunk for the keys up to its last query; 0 for later keys."""
    scores = query_RNH[chunk.rows].transpose(0, 1) @ key_STNH[chunk.sequence, : chunk.last + 1].permute(1, 2, 0)
    later = torch.arange(chunk.first + 1, chunk.last + 1) > positions_R[chunk.rows, None]
    scores[..., chunk.first + 1 :].masked_fill_(later, -torch.inf)
    return scores.softmax(-1)
