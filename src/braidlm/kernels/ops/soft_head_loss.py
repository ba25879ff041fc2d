"""A head that learns from teachers beside its labels: from their logits, or from their top k tokens.

As in `HeadLoss`, logits become the gradient in place, a program per row: that of a weighted sum of the text's loss and
the teachers' divergence. The references are `next_token_loss`, `divergence` and `top_k_divergence` of the distillation.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.ends import PER_LANE, WARPS, clear_row, fast_exp2, head_gradients, row_log_sum_exp
from braidlm.kernels.ops.launch import is_nvidia
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream

ROUNDING = 1e-6
"""What the top k of a distribution leave below this is the rounding of their sum."""


class TeacherLogits(NamedTuple):
    """Teachers of a batch, and how much of the loss is theirs: text_weight x text + weight x KL(teachers || model)."""

    logits: tuple[Tensor, ...]
    """The logits of each teacher [batch, time, vocabulary]. A model may have more entries, which are of no token: the
    teachers give them no probability."""
    shares: tuple[float, ...]
    """The share of each teacher in the averaged probabilities; the shares add up to 1."""
    text_weight: float
    weight: float


class TopTokens(NamedTuple):
    """Teachers of a batch by the k tokens that the teachers find most probable; all other tokens are one event."""

    ids: Tensor
    """[batch, time, k]."""
    logs: Tensor
    """[batch, time, k] float32: the logarithms of their probabilities."""
    text_weight: float
    weight: float


SoftTargets = TeacherLogits | TopTokens


class TaughtLosses(NamedTuple):
    """The losses of a head that learns soft targets beside its labels."""

    weighted: Tensor
    """The weighted sum of both, which alone has a gradient."""
    text: Tensor
    divergence: Tensor


@triton.jit
def _teachers_to_gradient(  # type: ignore[no-untyped-def]
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


@triton.jit
def _top_tokens_to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, count, ids, logs, losses, divergences, columns, stride, k, text_weight, weight, rounding,
    IGNORED: tl.constexpr, FAST: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * PER_LANE
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inverse_count = 1.0 / tl.load(count)
    start = logits + row * stride
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    if label == IGNORED:
        clear_row(start, columns, LANES, PER_LANE)
        tl.store(losses + row, 0.0)
        tl.store(divergences + row, 0.0)
        return
    target_logit = tl.load(start + label).to(tl.float32)
    place = tl.arange(0, TOP)
    is_top = place < k
    top = tl.load(ids + row * k + place, mask=is_top, other=0)
    taught_log = tl.load(logs + row * k + place, mask=is_top, other=-float("inf"))
    top_logit = tl.load(start + top, mask=is_top, other=-float("inf")).to(tl.float32)
    tl.debug_barrier()  # every thread has read what is now taken out
    tl.store(start + top, tl.full([TOP], -float("inf"), logits.dtype.element_ty), mask=is_top)
    tl.debug_barrier()
    others_lse = row_log_sum_exp(start, columns, FAST, LANES, PER_LANE)
    highest = tl.maximum(others_lse, tl.max(top_logit, 0))
    lse = highest + tl.log(tl.exp(others_lse - highest) + tl.sum(tl.exp(top_logit - highest), 0))
    tl.store(losses + row, (lse - target_logit) * inverse_count)

    taught = tl.exp(taught_log)
    left = 1.0 - tl.sum(taught, 0)
    left = tl.where(left > rounding, left, 0.0)
    left = tl.where(others_lse > -float("inf"), left, 0.0)  # there may be no others
    # Where the teachers' probability is 0, its logarithm, and maybe the model's own, is infinite.
    difference = tl.where(taught > 0.0, taught_log, 0.0) - tl.where(taught > 0.0, top_logit - lse, 0.0)
    others_lse = tl.where(left > 0.0, others_lse, lse)
    others_difference = tl.log(tl.where(left > 0.0, left, 1.0)) - (others_lse - lse)
    tl.store(divergences + row, (tl.sum(taught * difference, 0) + left * others_difference) * inverse_count)

    # The teachers leave a probability to all other tokens together; each has the share of it that the model gives.
    label = label.to(tl.int32)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        logit = tl.load(start + begin + offsets, mask=mask, other=-float("inf")).to(tl.float32) * LOG2_E
        gradient = (text_weight + weight) * fast_exp2(logit - lse * LOG2_E, FAST)
        if left > 0.0:
            gradient -= weight * left * fast_exp2(logit - others_lse * LOG2_E, FAST)
        gradient = tl.where(begin + offsets == label, gradient - text_weight, gradient)
        tl.store(start + begin + offsets, (gradient * inverse_count).to(logits.dtype.element_ty), mask=mask)
    tl.debug_barrier()
    gradient = (text_weight + weight) * tl.exp(top_logit - lse) - weight * taught
    gradient = tl.where(top == label, gradient - text_weight, gradient)
    tl.store(start + top, (gradient * inverse_count).to(logits.dtype.element_ty), mask=is_top)


def soft_targets_to_gradient_(
    logits: Tensor, labels: Tensor, count: Tensor, soft: SoftTargets, ignored: int
) -> tuple[Tensor, Tensor]:
    """Losses of the text and divergences [rows] of logits [rows, vocabulary], divided by `count`; the logits become
    the gradient of the weighted sum of both.
    """
    losses, divergences = torch.empty(2, len(labels), device=logits.device, dtype=torch.float32)
    sums, shape = (losses, divergences), (logits.shape[1], logits.stride(0))
    if isinstance(soft, TeacherLogits):
        teachers = tuple(teacher.flatten(0, -2) for teacher in soft.logits)
        vocabulary = teachers[0].shape[1]
        assert all(teacher.shape == (len(labels), vocabulary) and teacher.stride(1) == 1 for teacher in teachers)
        assert vocabulary <= logits.shape[1]
        _teachers_to_gradient[(len(labels),)](
            logits, labels, count, *sums, *shape, teachers, tuple(teacher.stride(0) for teacher in teachers),
            tuple(math.log2(share) for share in soft.shares), vocabulary, soft.text_weight, soft.weight,
            ignored, is_nvidia(logits), 32 * WARPS, PER_LANE, num_warps=WARPS,
        )  # fmt: skip
    else:
        ids, logs = (x.flatten(0, -2).contiguous() for x in (soft.ids, soft.logs))
        assert ids.shape == logs.shape == (len(labels), logs.shape[1])
        k = ids.shape[1]
        _top_tokens_to_gradient[(len(labels),)](
            logits, labels, count, ids, logs, *sums, *shape, k, soft.text_weight, soft.weight, ROUNDING,
            ignored, is_nvidia(logits), triton.next_power_of_2(k), 32 * WARPS, PER_LANE, num_warps=WARPS,
        )  # fmt: skip
    return losses, divergences


class SoftHeadLoss(torch.autograd.Function):
    """As `HeadLoss`, with soft targets: a weighted sum of losses, and both without their weights or gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, cast: Tensor | None, labels: Tensor, count: Tensor, ignored: int,
        tied: DeferredGradient | None, soft: SoftTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.weight_dtype, ctx.side, ctx.tied = weight.dtype, current_side_stream(), tied
        ctx.set_materialize_grads(False)
        cast = weight.to(hidden.dtype) if cast is None else cast
        logits = tuned_product(hidden, cast, transposed=True)
        losses, divergences = soft_targets_to_gradient_(logits, labels, count, soft, ignored)
        ctx.save_for_backward(logits, hidden, cast)
        text, divergence = losses.sum(), divergences.sum()
        ctx.mark_non_differentiable(text, divergence)
        return soft.text_weight * text + soft.weight * divergence, text, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return *head_gradients(ctx, upstream), *[None] * 6


def taught_head_loss(soft: SoftTargets, *arguments: Any) -> TaughtLosses:
    """`SoftHeadLoss` of the arguments of `HeadLoss`."""
    return TaughtLosses(*SoftHeadLoss.apply(*arguments, soft))


@triton.jit
def _average(  # type: ignore[no-untyped-def]
    logits, strides, log_shares, averaged, columns,
    FAST: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """`logits`, `strides` and `log_shares` (in base 2) are tuples with an entry for each model."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    shifts = ()  # what turns a model's logits into its part of the average
    for k in tl.static_range(len(logits)):
        lse = row_log_sum_exp(logits[k] + row * strides[k], columns, FAST, LANES, PER_LANE)
        shifts += (log_shares[k] - lse * LOG2_E,)  # type: ignore[assignment]
    for begin in range(0, columns, LANES * PER_LANE):
        mask = begin + offsets < columns
        parts = ()
        # Beside the largest part none is lost that counts, however improbable all are. It is finite: inf - inf is NaN.
        highest = tl.full([LANES, PER_LANE], -1e30, tl.float32)
        for k in tl.static_range(len(logits)):
            logit = tl.load(logits[k] + row * strides[k] + begin + offsets, mask=mask, other=0.0).to(tl.float32)
            part = logit * LOG2_E + shifts[k]
            parts += (part,)  # type: ignore[assignment]
            highest = tl.maximum(highest, part)
        total = tl.zeros([LANES, PER_LANE], tl.float32)
        for k in tl.static_range(len(logits)):
            total += fast_exp2(parts[k] - highest, FAST)
        tl.store(averaged + row * columns + begin + offsets, (highest + tl.log2(total)) * LN_2, mask=mask)


def averaged_logs(logits: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The logarithm of averaged probabilities, float32 [..., vocabulary], from the logits [..., vocabulary] of models
    whose shares add up to 1; the reference is `averaged_log_probabilities` of the distillation.

    A program reads its row of every model's logits twice, the second time from the cache, and writes the result once.
    """
    rows = tuple(each.flatten(0, -2) for each in logits)
    assert all(each.shape == rows[0].shape and each.stride(1) == 1 for each in rows)
    averaged = torch.empty(logits[0].shape, device=logits[0].device, dtype=torch.float32)
    _average[(len(rows[0]),)](
        rows, tuple(each.stride(0) for each in rows), tuple(math.log2(share) for share in shares), averaged,
        averaged.shape[-1], is_nvidia(averaged), 32 * WARPS, PER_LANE, num_warps=WARPS,
    )  # fmt: skip
    return averaged
