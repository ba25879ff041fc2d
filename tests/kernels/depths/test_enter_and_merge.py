"""Kernels of a mixture of depths against their references: who enters, the way in and out, and the router."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.depths.enter_and_merge import (
    Choice,
    Enter,
    EnterConfig,
    Merge,
    MergeConfig,
    choose_tokens,
    plain_choose_tokens,
    plain_enter,
    plain_merge,
)
from braidlm.kernels.depths.predict import Predict, plain_predict
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.norm import AddDelta
from braidlm.kernels.side_stream import use_side_stream
from tests.kernels.comparison import assert_equal_with_gradients, nan_in_new_memory, side_stream

BATCH, TIME, WIDTH, HIDDEN, RATE = 3, 23, 24, 8, 0.25


def test_tokens_of_a_long_row(device: str) -> None:
    scores = torch.randn(2, 1300, device=device)
    for ours, theirs in zip(choose_tokens(scores, 170), plain_choose_tokens(scores, 170), strict=True):
        assert torch.equal(ours, theirs)


def block(inside: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rows after a block's first part, and what its second part adds."""
    wide = inside.to(matrix.dtype)
    return (wide * 1.5 + wide.sin()).to(inside.dtype), (wide @ matrix).to(inside.dtype)


def tokens_of(index_BK: Tensor) -> Tensor:
    """The tokens that enter among all of the batch."""
    return (index_BK + TIME * torch.arange(BATCH, device=index_BK.device)[:, None]).flatten()


@pytest.mark.parametrize("count", [1, 9, TIME])
@pytest.mark.parametrize("pending", ["nothing", "delta", "delta and bias", "dropout"])
def test_the_way_in_and_out_equals_torch(pending: str, count: int, device: str, dtype: torch.dtype) -> None:
    seed = torch.tensor([7], device=device) if pending == "dropout" else None
    rate, tokens = RATE if pending == "dropout" else 0.0, BATCH * TIME
    zeros, few = (torch.zeros(rows, WIDTH, device=device) for rows in (tokens, BATCH * count))
    kept, kept_inside = (AddDelta.apply(x, x + 1, None, DropoutUse(rate, seed)) for x in (zeros, few))
    stream, delta = (torch.randn(tokens, WIDTH, device=device).to(dtype) for _ in range(2))
    matrix = 0.2 * torch.randn(WIDTH, WIDTH, device=device)
    bias, inner_bias, weight = (torch.randn(1, WIDTH, device=device) for _ in range(3))
    adds, biased = pending != "nothing", pending in ("delta and bias", "dropout")
    chosen: list[Tensor] = []

    def fused(*inputs: Tensor) -> Tensor:
        stream, delta, bias, inner_bias, weight, matrix = inputs
        config = EnterConfig(BATCH, count, ColumnSums(1), dropout=DropoutUse(rate, seed))
        pair = (delta if adds else None, bias[0] if biased else None)
        summed, inside, scores, _, *chosen[:] = Enter.apply(stream, *pair, weight, config)
        output, added = block(inside, matrix)
        config = MergeConfig(Choice(*chosen), dropout=DropoutUse(rate, seed))
        merged = Merge.apply(summed, inside, output, added, inner_bias[0], scores, config)
        return merged + 0 * (delta.sum() + bias.sum())  # so that all inputs have a gradient

    def plain(*inputs: Tensor) -> Tensor:
        stream, delta, bias, inner_bias, weight, matrix = inputs
        pair = ((delta + bias if biased else delta) * kept if adds else None, None)
        token_R = tokens_of(chosen[0])  # rounding may change near ties
        summed, inside, scores = plain_enter(stream, *pair, weight, token_R)
        if dtype == torch.float32:
            assert torch.equal(chosen[0], plain_choose_tokens(scores.view(BATCH, TIME), count).index_BK)
        output, added = block(inside, matrix)
        added = (added + inner_bias) * kept_inside
        merged = plain_merge(summed, inside, output, added, None, scores[token_R], token_R)
        return merged + 0 * (delta.sum() + bias.sum())

    with nan_in_new_memory():
        assert_equal_with_gradients(fused, plain, [stream, delta, bias, inner_bias, weight, matrix], dtype, 4)


def test_a_block_that_leaves_nothing_to_add(device: str, dtype: torch.dtype) -> None:
    stream, weight = torch.randn(BATCH * TIME, WIDTH, device=device).to(dtype), torch.randn(1, WIDTH, device=device)
    chosen: list[Tensor] = []

    def fused(stream: Tensor, weight: Tensor) -> Tensor:
        config = EnterConfig(BATCH, 4, ColumnSums(1))
        summed, inside, scores, _, *chosen[:] = Enter.apply(stream, None, None, weight, config)
        return Merge.apply(summed, inside, inside.sin(), None, None, scores, MergeConfig(Choice(*chosen)))

    def plain(stream: Tensor, weight: Tensor) -> Tensor:
        token_R = tokens_of(chosen[0])
        summed, inside, scores = plain_enter(stream, None, None, weight, token_R)
        return plain_merge(summed, inside, inside.sin(), None, None, scores[token_R], token_R)

    assert_equal_with_gradients(fused, plain, [stream, weight], dtype, 4)


@pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked"])
def test_the_router_equals_torch(stacked: bool, device: str, dtype: torch.dtype) -> None:
    tokens = BATCH * TIME
    shapes = ((HIDDEN, WIDTH), (HIDDEN,), (2, HIDDEN), (2,))
    stream, weights = (
        torch.randn(tokens, WIDTH, device=device).to(dtype),
        [torch.randn(*s, device=device) for s in shapes],
    )
    weights[0] = weights[0].to(dtype).float()  # the product reads a cast copy
    scales = torch.rand(tokens, device=device) + 0.5
    places = torch.randint(-1, 2, (tokens,), dtype=torch.int32, device=device)
    side = side_stream(device)

    def fused(weight: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        slot, rows = None, stream
        with use_side_stream(side):
            if stacked:
                inputs, gradients = (StackedRows(1, tokens, size, dtype) for size in (WIDTH, len(weight)))
                (slot,) = GradientStack(inputs, gradients).slots()
                rows = slot.input.copy_(stream)
            cast = weight.detach().to(dtype)
            scores, probabilities, chosen, _ = Predict.apply(rows, scales, weight, cast, *vectors, places, slot)
        side.synchronize()
        assert torch.equal(chosen[:, 0], (places < 0).long())
        return scores, probabilities

    def plain(*weights: Tensor) -> tuple[Tensor, Tensor]:
        return plain_predict(stream.double(), scales.double(), *weights)

    assert_equal_with_gradients(fused, plain, weights, dtype)
