"""The logarithm of the averaged probabilities of several models, from their logits, a program per row.

A program reads its row of every model's logits twice, the second time from the cache, and writes the result once. The
reference is `averaged_log_probabilities` of the distillation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from braidlm.kernels.ops.ends import PER_LANE, WARPS, fast_exp2, row_log_sum_exp
from braidlm.kernels.ops.launch import is_nvidia
from braidlm.kernels.optional_triton import tl, triton


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
    """float32 [..., vocabulary] of logits [..., vocabulary] of each model, whose shares add up to 1."""
    rows = tuple(each.flatten(0, -2) for each in logits)
    assert all(each.shape == rows[0].shape and each.stride(1) == 1 for each in rows)
    averaged = torch.empty(logits[0].shape, device=logits[0].device, dtype=torch.float32)
    _average[(len(rows[0]),)](
        rows, tuple(each.stride(0) for each in rows), tuple(math.log2(share) for share in shares), averaged,
        averaged.shape[-1], is_nvidia(averaged), 32 * WARPS, PER_LANE, num_warps=WARPS,
    )  # fmt: skip
    return averaged
