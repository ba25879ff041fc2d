"""Head and loss in one: scores are turned into their gradient where they stand, so they cross memory only once.

A Triton kernel per row finds the maximum and the sum of exponentials in one sweep and writes the gradient in a second,
which reads the row from the cache. The reference is `losses.next_token_loss` on the head's output.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _loss_and_gradient(logits, labels, count, losses, columns, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: its loss, and its logits replaced by d(sum of losses / count) / d(logits)."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    if label == IGNORED:
        for begin in range(0, columns, BLOCK):
            inside = begin + offsets < columns
            tl.store(start + begin + offsets, tl.zeros([BLOCK], logits.dtype.element_ty), mask=inside)
        tl.store(losses + row, 0.0)
        return
    highest = -float("inf")
    total = 0.0
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        score = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(highest, tl.max(score))
        total = total * tl.exp(highest - peak) + tl.sum(tl.exp(score - peak))
        highest = peak
    log_total = highest + tl.log(total)
    tl.store(losses + row, log_total - tl.load(start + label).to(tl.float32))
    scale = 1.0 / tl.load(count)
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        score = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        probability = tl.exp(score - log_total)
        gradient = (probability - tl.where(begin + offsets == label, 1.0, 0.0)) * scale
        tl.store(start + begin + offsets, gradient.to(logits.dtype.element_ty), mask=inside)


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
        logits = hidden @ weight.t()
        losses = torch.empty(len(labels), device=hidden.device, dtype=torch.float32)
        _loss_and_gradient[(len(labels),)](
            logits, labels, count, losses, logits.shape[1], logits.stride(0), IGNORED=ignored, BLOCK=BLOCK, num_warps=8
        )
        ctx.save_for_backward(logits, hidden, weight)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, weight = ctx.saved_tensors
        factor = upstream[0].to(hidden.dtype)
        return (gradient @ weight) * factor, (gradient.t() @ hidden) * factor, None, None, None
