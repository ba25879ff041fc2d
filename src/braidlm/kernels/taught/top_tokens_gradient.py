"""Logits become the gradient of the text's loss and the divergence from the teachers' top k tokens, in place.

One program per row. It first takes the k logits out of the row, so that one sweep sums the others alone: their
probability together may be less than float32 resolves beside 1. The references are `next_token_loss` and
`top_k_divergence` of the distillation.
"""

import torch
from torch import Tensor

from braidlm.kernels.ops.head_loss import PER_LANE, WARPS, clear_row, fast_exp2, row_log_sum_exp
from braidlm.kernels.ops.launch import is_nvidia
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.taught.soft_targets import ROUNDING, TopTokens


@triton.jit
def _logits_to_gradient(  # type: ignore[no-untyped-def]
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

    # Of what the teachers leave to the others, each of these has the share that the model gives it.
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


def top_tokens_to_gradient_(
    logits: Tensor, labels: Tensor, count: Tensor, soft: TopTokens, ignored: int
) -> tuple[Tensor, Tensor]:
    """Losses of the text and divergences [rows] of logits [rows, vocabulary], divided by `count`; the logits become
    the gradient of the weighted sum of both.
    """
    losses, divergences = torch.empty(2, len(labels), device=logits.device, dtype=torch.float32)
    ids, logs = (x.flatten(0, -2).contiguous() for x in (soft.ids, soft.logs))
    assert ids.shape == logs.shape == (len(labels), logs.shape[1])
    k = ids.shape[1]
    _logits_to_gradient[(len(labels),)](
        logits, labels, count, ids, logs, losses, divergences, logits.shape[1], logits.stride(0), k,
        soft.text_weight, soft.weight, ROUNDING,
        ignored, is_nvidia(logits), triton.next_power_of_2(k), 32 * WARPS, PER_LANE, num_warps=WARPS,
    )  # fmt: skip
    return losses, divergences
