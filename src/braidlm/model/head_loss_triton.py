"""The CUDA kernels of `head_loss`: scores become the gradient of the mean loss, one program per row.

The first sweep over a row finds its maximum and its sum of exponentials, the second, which reads it from the cache,
writes the gradient: memory is crossed once.
"""

import torch
from torch import Tensor

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

BLOCK = 8192


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, count, losses, columns, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    share = 1.0 / tl.load(count)
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
        tl.store(start + begin + offsets, (gradient * share).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _scale(numbers, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    by = tl.load(factor)
    if by == 1.0:
        return
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + place, mask=place < size).to(tl.float32) * by
    tl.store(numbers + place, x.to(numbers.dtype.element_ty), mask=place < size)


def to_gradient_cuda_(logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], which become the gradient of their sum divided by `count`."""
    losses = torch.empty(len(labels), device=logits.device, dtype=torch.float32)
    _to_gradient[(len(labels),)](
        logits, labels, count, losses, logits.shape[1], logits.stride(0), IGNORED=ignored, BLOCK=BLOCK, num_warps=8
    )
    return losses


def scale_cuda_(numbers: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a number on the device: the gradient of the loss itself, which is 1 but for data parallelism."""
    _scale[(triton.cdiv(numbers.numel(), BLOCK),)](numbers, factor, numbers.numel(), BLOCK, num_warps=8)
    return numbers
