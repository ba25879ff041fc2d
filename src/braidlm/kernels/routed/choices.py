"""Pieces of kernels that route: scores, the top k of them, and the gradients of either.

Triton inlines them: a kernel is as if they were written out in it.
"""

from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import combined_rows

MAX_FEW = 4
"""Choices for each of which a program that reads whole rows can hold the weights and, backward, a sum in registers.

With 8, of rows of 384 channels, such a program is far slower than one that computes by blocks (H200, LOG.md).
"""


@triton.jit
def router_scores(  # type: ignore[no-untyped-def]
    x, weight, bias, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """Scores [choice, row] of x [row, column]: choices come first, so that sums over the width stay within a warp."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < choices
    matrix = weight + choice[:, None] * width + column[None, :]
    w = tl.load(matrix, mask=choice_mask[:, None] & (column < width)[None, :], other=0.0)
    s = tl.sum(x[None, :, :] * w[:, None, :], 2)
    if bias is not None:
        s += tl.load(bias + choice, mask=choice_mask, other=0.0)[:, None]
    return s


@triton.jit
def select_top_k(  # type: ignore[no-untyped-def]
    s, balance, scores, probabilities, chosen, weights, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Store scores [choice, row], probabilities, the top k choices and their weights."""
    row_mask = row < rows
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < choices
    mask = row_mask[None, :] & choice_mask[:, None]
    offsets = row.to(tl.int64)[None, :] * choices + choice[:, None]
    tl.store(scores + offsets, s, mask=mask)
    s = tl.where(choice_mask[:, None], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 0)[None, :])
    p = p / tl.sum(p, 0)[None, :]
    tl.store(probabilities + offsets, p, mask=mask)
    ranking = s
    if balance is not None:
        ranking = p + tl.load(balance + choice, mask=choice_mask, other=0.0)[:, None]
    # Closed choices, whose scores are infinite, come after all others, and before those that were chosen already.
    ranking = tl.where(choice_mask[:, None], tl.maximum(ranking, -1e38), float("-inf"))
    place = tl.full([CHOICES, ROWS], -1, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(ranking, 0)
        tl.store(chosen + row.to(tl.int64) * TOP_K + k, best.to(tl.int64), mask=row_mask)
        selected = choice[:, None] == best[None, :]
        place = tl.where(selected, k, place)
        ranking = tl.where(selected, float("-inf"), ranking)
    value = p
    if RENORMALISE:
        value = p / tl.sum(tl.where(place >= 0, p, 0.0), 0)[None, :]
    tl.store(weights + row.to(tl.int64)[None, :] * TOP_K + place, value, mask=row_mask[None, :] & (place >= 0))


@triton.jit
def score_gradient(  # type: ignore[no-untyped-def]
    probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """The gradient [choice, row] of the scores, from the gradients of weights, probabilities and scores (or None)."""
    row_mask = row < rows
    choice = tl.arange(0, CHOICES)
    mask = row_mask[None, :] & (choice < choices)[:, None]
    offsets = row[None, :] * choices + choice[:, None]
    p = tl.load(probabilities + offsets, mask=mask, other=0.0)
    dp = tl.zeros([CHOICES, ROWS], tl.float32)
    if probabilities_gradient is not None:
        dp += tl.load(probabilities_gradient + offsets, mask=mask, other=0.0)
    if weights_gradient is not None:
        picked = tl.zeros([CHOICES, ROWS], tl.float32)
        dw = tl.zeros([CHOICES, ROWS], tl.float32)
        for k in tl.static_range(TOP_K):
            offset = row * TOP_K + k
            selected = choice[:, None] == tl.load(chosen + offset, mask=row_mask, other=-1)[None, :]
            picked += tl.where(selected, 1.0, 0.0)
            dw += tl.where(selected, tl.load(weights_gradient + offset, mask=row_mask, other=0.0)[None, :], 0.0)
        if RENORMALISE:  # weights are probabilities divided by the sum of those that were chosen
            chosen_p = p * picked
            total = tl.where(row_mask, tl.sum(chosen_p, 0), 1.0)
            projection = tl.sum(chosen_p * dw, 0) / total
            dw = picked * (dw - projection[None, :]) / total[None, :]
        dp += dw
    ds = p * (dp - tl.sum(p * dp, 0)[None, :])
    if scores_gradient is not None:
        ds += tl.load(scores_gradient + offsets, mask=mask, other=0.0)
    return tl.where(mask, ds, 0.0)


@triton.jit
def readers_gradient(  # type: ignore[no-untyped-def]
    stream_gradient, rows_gradient, row_of_choice, row, rows, mask, offsets, column, width, TOP_K: tl.constexpr
):
    """The gradient that the stream's other readers have: one that is there, and one of sorted rows (each may be None).

    Kernels load it first, so that it is there when they have computed their own.
    """
    total = tl.zeros(mask.shape, tl.float32)
    if stream_gradient is not None:
        total += tl.load(stream_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if rows_gradient is not None:
        total += combined_rows(rows_gradient, None, row_of_choice, row, row < rows, mask, column[None, :], width, TOP_K)
    return total


@triton.jit
def store_sums(  # type: ignore[no-untyped-def]
    sums, weight_sum, bias_sum, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """Store a program's gradients of weight [choice, row, column] and bias [choice, row], summed over its rows."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    mask = (choice < choices)[:, None] & (column < width)[None, :]
    tl.store(sums + choice[:, None] * width + column[None, :], tl.sum(weight_sum, 1), mask=mask)
    tl.store(sums + choices * width + choice, tl.sum(bias_sum, 1), mask=choice < choices)
