"""The CUDA kernel of `head_loss.to_gradient_`: one program per row, which crosses memory once.

The first sweep over a row finds its maximum and its sum of exponentials, the second, which reads it from the cache,
writes the gradient.
"""

import torch
from torch import Tensor

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

BLOCK = 4096


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, losses, columns, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
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
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        score = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(score - log_total) - tl.where(begin + offsets == label, 1.0, 0.0)
        tl.store(start + begin + offsets, gradient.to(logits.dtype.element_ty), mask=inside)


def to_gradient_cuda_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], which become the gradient of their sum."""
    losses = torch.empty(len(labels), device=logits.device, dtype=torch.float32)
    _to_gradient[(len(labels),)](
        logits, labels, losses, logits.shape[1], logits.stride(0), IGNORED=ignored, BLOCK=BLOCK, num_warps=8
    )
    return losses
