"""The CUDA kernels of `head_loss`: scores become the gradient of the mean loss, one program per row.

The first sweep over a row finds its maximum and its sum of exponentials, the second, which reads it from the cache,
writes the gradient: memory is crossed once. In the first sweep each lane keeps a maximum and a sum of its own, so that
no thread waits for another before the row's end.
"""

import torch
from torch import Tensor

from braidlm.kernels.ops.launching import is_nvidia

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

WARPS, EACH, BLOCK = 16, 8, 8192
"""Warps for a row, numbers that a lane loads at once (16 bytes of bf16), numbers of a block where nothing is summed."""


@triton.jit
def _power_of_two(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The hardware's own instruction, where it is, is exact to some 2^-22; tiny results become 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, count, losses, columns, stride, IGNORED: tl.constexpr, FAST: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * EACH
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    share = 1.0 / tl.load(count)
    start = logits + row * stride
    wanted = tl.load(start + label, mask=label != IGNORED, other=0.0).to(tl.float32)  # now: later it is overwritten
    offsets = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    if label == IGNORED:
        for begin in range(0, columns, BLOCK):
            inside = begin + offsets < columns
            tl.store(start + begin + offsets, tl.zeros([LANES, EACH], logits.dtype.element_ty), mask=inside)
        tl.store(losses + row, 0.0)
        return
    highest = tl.full([LANES], -1e30, tl.float32)  # not infinite: a lane may have nothing, and inf - inf is no number
    total = tl.zeros([LANES], tl.float32)
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        score = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(highest, tl.max(score, 1))
        powers = _power_of_two(score * LOG2_E - (peak * LOG2_E)[:, None], FAST)
        total = total * _power_of_two((highest - peak) * LOG2_E, FAST) + tl.sum(powers, 1)
        highest = peak
    peak = tl.max(highest, 0)
    log_total = peak + tl.log(tl.sum(total * _power_of_two((highest - peak) * LOG2_E, FAST), 0))
    tl.store(losses + row, (log_total - wanted) * share)
    label = label.to(tl.int32)
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        score = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        probability = _power_of_two(score * LOG2_E - log_total * LOG2_E, FAST)
        gradient = tl.where(begin + offsets == label, probability - 1.0, probability)
        tl.store(start + begin + offsets, (gradient * share).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _scale(numbers, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    by = tl.load(factor)
    if by == 1.0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + offsets, mask=offsets < size).to(tl.float32) * by
    tl.store(numbers + offsets, x.to(numbers.dtype.element_ty), mask=offsets < size)


def to_gradient_cuda_(logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], divided by `count`; the logits become the gradient of their sum."""
    losses = torch.empty(len(labels), device=logits.device, dtype=torch.float32)
    _to_gradient[(len(labels),)](
        logits, labels, count, losses, logits.shape[1], logits.stride(0),
        ignored, is_nvidia(logits), 32 * WARPS, EACH, num_warps=WARPS,
    )  # fmt: skip
    return losses


def scale_cuda_(numbers: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a number on the device: the gradient of the loss itself, which is 1 but for data parallelism."""
    _scale[(triton.cdiv(numbers.numel(), BLOCK),)](numbers, factor, numbers.numel(), BLOCK, num_warps=8)
    return numbers
