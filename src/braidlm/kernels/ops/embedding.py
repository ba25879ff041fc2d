"""Tokens and positions into the stream: one pass over memory forward and one backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.launch import row_tile
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side


@triton.jit
def _embed_forward(  # type: ignore[no-untyped-def]
    ids, tokens, positions, stream, rows, time, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (column < width)
    token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    x = tl.load(tokens + token * width + column, mask=mask, other=0.0).to(tl.float32)
    if positions is not None:
        x += tl.load(positions + (row % time)[:, None] * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(stream + row.to(tl.int64)[:, None] * width + column, x.to(stream.dtype.element_ty), mask=mask)


@triton.jit
def _embed_backward(  # type: ignore[no-untyped-def]
    ids, gradient, token_gradient, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (column < width)
    token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    x = tl.load(gradient + row.to(tl.int64)[:, None] * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(token_gradient + token * width + column, x, mask=mask, sem="relaxed")


class Embed(torch.autograd.Function):
    """ids [batch, time], tokens [vocabulary, width], positions [context, width] or None -> [batch * time, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        tokens: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        tied: DeferredGradient | None,
    ) -> Tensor:
        width, time = tokens.shape[1], ids.shape[1]
        stream = torch.empty(ids.numel(), width, dtype=dtype, device=tokens.device)
        tile = row_tile(width)
        grid = (triton.cdiv(len(stream), tile["ROWS"]),)
        _embed_forward[grid](ids, tokens, positions, stream, len(stream), time, width, **tile)
        ctx.save_for_backward(ids)
        ctx.vocabulary, ctx.context = len(tokens), None if positions is None else len(positions)
        ctx.side, ctx.tied = current_side_stream(), tied
        return stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        (rows, width), tile = gradient.shape, row_tile(gradient.shape[1])
        gradient = gradient.contiguous()
        positions = None
        if ctx.context is not None:
            with on_side(ctx.side, gradient, priority=True):
                positions = gradient.view(*ids.shape, width).sum(0, dtype=torch.float32)
                if len(positions) < ctx.context:
                    positions = F.pad(positions, (0, 0, 0, ctx.context - len(positions)))
        if ctx.tied is None:
            tokens = torch.zeros(ctx.vocabulary, width, dtype=torch.float32, device=gradient.device)
        else:
            tokens = ctx.tied.read()
        _embed_backward[(triton.cdiv(rows, tile["ROWS"]),)](ids, gradient, tokens, rows, width, **tile)
        if ctx.side is not None:
            ctx.side.synchronize()  # autograd adds the gradients of whoever shares the matrix right after this
        return None, tokens, positions, None, None


def plain_embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    embedded = F.embedding(ids, tokens)
    return (embedded if positions is None else embedded + positions[: ids.shape[1]]).flatten(0, 1)
