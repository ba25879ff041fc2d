"""Logits become the gradient of the text's loss and the divergence from teachers' logits, in place, a program per row.

A program reads its row of every teacher's logits and of the model's own twice, the second time from the cache; the
averaged probabilities are never written. The references are `next_token_loss` and `divergence` of the distillation.
"""

import math

import torch
from torch import Tensor

from braidlm.kernels.ops.head_loss import PER_LANE, WARPS, clear_row, fast_exp2, row_log_sum_exp
from braidlm.kernels.ops.launch import is_nvidia
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.taught.soft_targets import TeacherLogits


@triton.jit
def _logits_to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, count, losses, divergences, columns, stride,
    teachers, teacher_strides, log_shares, teacher_columns, text_weight, weight,
    IGNORED: tl.constexpr, FAST: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """`teachers`, `teacher_strides` and `log_shares` (in base 2) are tuples with an entry for each teacher."""
    BLOCK: tl.constexpr = LANES * PER_LANE
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inverse_count = 1.0 / tl.load(count)
    start = logits + row * stride
    # Loaded here, since it is overwritten below.
    target_logit = tl.load(start + label, mask=label != IGNORED, other=0.0).to(tl.float32)
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    if label == IGNORED:
        clear_row(start, columns, LANES, PER_LANE)
        tl.store(losses + row, 0.0)
        tl.store(divergences + row, 0.0)
        return
    lse = row_log_sum_exp(start, columns, FAST, LANES, PER_LANE)
    shifts = ()  # what turns a teacher's logits into its part of the average
    for k in tl.static_range(len(teachers)):
        teacher_lse = row_log_sum_exp(teachers[k] + row * teacher_strides[k], teacher_columns, FAST, LANES, PER_LANE)
        shifts += (log_shares[k] - teacher_lse * LOG2_E,)  # type: ignore[assignment]
    tl.store(losses + row, (lse - target_logit) * inverse_count)
    label = label.to(tl.int32)
    divergence = tl.zeros([LANES], tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        logit = tl.load(start + begin + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        log_probability = logit * LOG2_E - lse * LOG2_E
        taught = tl.zeros([LANES, PER_LANE], tl.float32)
        for k in tl.static_range(len(teachers)):
            teacher = teachers[k] + row * teacher_strides[k] + begin + offsets
            has = begin + offsets < teacher_columns
            teacher_logit = tl.load(teacher, mask=has, other=-float("inf")).to(tl.float32)
            taught += fast_exp2(teacher_logit * LOG2_E + shifts[k], FAST)
        # Where the teachers' probability is 0, its logarithm, and maybe the model's own, is infinite.
        difference = tl.where(taught > 0.0, tl.log2(tl.where(taught > 0.0, taught, 1.0)) - log_probability, 0.0)
        divergence += tl.sum(taught * difference, 1)
        gradient = (text_weight + weight) * fast_exp2(log_probability, FAST) - weight * taught
        gradient = tl.where(begin + offsets == label, gradient - text_weight, gradient)
        tl.store(start + begin + offsets, (gradient * inverse_count).to(logits.dtype.element_ty), mask=mask)
    tl.store(divergences + row, tl.sum(divergence, 0) * LN_2 * inverse_count)


def teachers_to_gradient_(
    logits: Tensor, labels: Tensor, count: Tensor, soft: TeacherLogits, ignored: int
) -> tuple[Tensor, Tensor]:
    """Losses of the text and divergences [rows] of logits [rows, vocabulary], divided by `count`; the logits become
    the gradient of the weighted sum of both.
    """
    losses, divergences = torch.empty(2, len(labels), device=logits.device, dtype=torch.float32)
    teachers = tuple(teacher.flatten(0, -2) for teacher in soft.logits)
    vocabulary = teachers[0].shape[1]
    assert all(teacher.shape == (len(labels), vocabulary) and teacher.stride(1) == 1 for teacher in teachers)
    assert vocabulary <= logits.shape[1]
    _logits_to_gradient[(len(labels),)](
        logits, labels, count, losses, divergences, logits.shape[1], logits.stride(0),
        teachers, tuple(teacher.stride(0) for teacher in teachers), tuple(math.log2(share) for share in soft.shares),
        vocabulary, soft.text_weight, soft.weight,
        ignored, is_nvidia(logits), 32 * WARPS, PER_LANE, num_warps=WARPS,
    )  # fmt: skip
    return losses, divergences
