"""Feed-forward experts with the weighted sum of their rows against torch's operations."""

from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.gradient_stacks import StackedRows
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.routed.combine import DeferredDispatch, plain_combine
from braidlm.kernels.routed.grouped.layers import CombinedFeed, FeedConfig, plain_grouped_feed
from braidlm.kernels.routed.grouped.weights import GroupedGradientStack
from braidlm.kernels.routed.permutation import Permutation, permute
from braidlm.kernels.routed.router import Route, plain_route
from braidlm.kernels.side_stream import use_side_stream
from tests.kernels.comparison import assert_equal_with_gradients, dropout_factors, nan_in_new_memory, side_stream
from tests.kernels.sorted_rows import TILE, choices, matrices, permuted


def check(
    permutation: Permutation,
    sizes: tuple[int, int],
    kind: str,
    gated: bool,
    biased: bool,
    based: bool,
    dtype: Any,
    dropout: DropoutUse = NO_DROPOUT,
) -> None:
    device, (tokens, top_k) = str(permutation.source.device), permutation.row_of_choice.shape
    experts, (width, hidden) = permutation.experts, sizes
    inner = 2 * hidden if gated else hidden
    up, up_cast, up_rounding = matrices(experts, width, inner, dtype=dtype, device=device)
    out, out_cast, out_rounding = matrices(experts, hidden, width, dtype=dtype, device=device)
    rows = torch.randn(tokens, width, device=device).to(dtype)
    bias, out_bias = (torch.randn(experts, size, device=device) if biased else None for size in (inner, width))
    base = torch.randn(tokens, width, device=device).to(dtype) if based else None
    weights = torch.rand(tokens, top_k, device=device)
    config = FeedConfig(permutation, kind, gated, inner_dropout=dropout)

    def fused(r: Tensor, u: Tensor, b: Any, o: Tensor, ob: Any, w: Tensor, base: Any) -> Tensor:
        return CombinedFeed.apply(r, u, up_cast, b, o, out_cast, ob, w, base, config)

    def plain(r: Tensor, u: Tensor, b: Any, o: Tensor, ob: Any, w: Tensor, base: Any) -> Tensor:
        up, out, factors = u + up_rounding, o + out_rounding, dropout_factors(dropout, permutation.rows, hidden)
        combined = plain_combine(plain_grouped_feed(r, up, b, out, ob, None, config, factors), w, permutation)
        return combined if base is None else combined + base

    assert_equal_with_gradients(fused, plain, [rows, up, bias, out, out_bias, weights, base], dtype)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(
    ("case", "kind"),
    [("top 1, an empty expert", "gelu_new"), ("all", "gelu"), ("top 2, an empty expert", "silu"), ("top 2", "relu")],
)
def test_combined_feed_equals_torch(
    case: str, kind: str, gated: bool, biased: bool, device: str, dtype: torch.dtype
) -> None:
    check(permuted(case, device)[0], (24, 40), kind, gated, biased, biased == gated, dtype)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_dropout_of_activations(gated: bool, device: str, dtype: torch.dtype) -> None:
    dropout = DropoutUse(0.25, torch.tensor([7], device=device))
    check(permuted("top 2, an empty expert", device)[0], (24, 40), "gelu_new", gated, True, True, dtype, dropout)


def test_projections_on_several_blocks_of_channels_are_added_up(device: str, dtype: torch.dtype) -> None:
    check(permuted("top 2", device)[0], (24, 136), "gelu_new", False, True, False, dtype)


def test_padding_rows_are_never_read(device: str, dtype: torch.dtype) -> None:
    permutation, _ = permuted("top 2, an empty expert", device)
    with nan_in_new_memory():
        check(permutation, (24, 40), "gelu_new", False, True, True, dtype)


def test_layers_that_share_a_stack_get_their_own_gradients(device: str, dtype: torch.dtype) -> None:
    """Three layers whose gradients of the last matrix are computed at once, from the gradients of tokens' sums."""
    width, hidden, side = 24, 40, side_stream(device)
    permutations = [permuted("top 2", device)[0] for _ in range(3)]
    tokens, experts = len(permutations[0].row_of_choice), permutations[0].experts
    weights = torch.rand(tokens, 2, device=device)
    ups, outs = ([matrices(experts, *s, dtype=dtype, device=device) for _ in permutations] for s in
                 ((width, hidden), (hidden, width)))  # fmt: skip
    biases = [torch.randn(experts, width, device=device) for _ in permutations]
    rows = torch.randn(tokens, width, device=device).to(dtype)

    def run(stacked: bool) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (*(o[0] for o in outs), *biases)]
        slots: list[Any] = [None] * 3
        with use_side_stream(side):
            if stacked:
                inputs = StackedRows(3, permutations[0].rows, hidden, dtype)
                gradients = StackedRows(3, tokens, width, dtype)
                slots = list(GroupedGradientStack(experts, inputs, gradients, True, "gradients").slots())
            stream = rows
            for index, permutation in enumerate(permutations):
                up, out = ups[index], outs[index]
                stream = CombinedFeed.apply(
                    stream, up[0], up[1], None, leaves[index], out[1], leaves[3 + index], weights, stream,
                    FeedConfig(permutation, "gelu_new", False, out_slot=slots[index]),
                )  # fmt: skip
            gradients = torch.autograd.grad(stream, leaves, torch.ones_like(stream))
            side.synchronize()
        return list(gradients)

    for ours, theirs in zip(run(stacked=True), run(stacked=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", [4, 17])
@pytest.mark.parametrize("weights_read", [False, True], ids=["", "weights read by a loss"])
def test_gradients_handed_to_the_router_equal_those_of_autograd(
    experts: int, weights_read: bool, device: str, dtype: torch.dtype
) -> None:
    """Another part reads the same tokens, as a shared part beside the experts does."""
    width, hidden, tokens, top_k = 24, 40, 70, 3
    up, up_cast, up_rounding = matrices(experts, width, hidden, dtype=dtype, device=device)
    out, out_cast, out_rounding = matrices(experts, hidden, width, dtype=dtype, device=device)
    stream, router = torch.randn(tokens, width, device=device).to(dtype), torch.randn(experts, width, device=device)
    bias, out_bias = torch.randn(experts, device=device), torch.randn(experts, width, device=device)
    chosen = plain_route(stream.double(), router.double(), bias.double(), None, top_k, True)[3]
    permutation = permute(chosen, experts, 2, TILE)

    def fused(s: Tensor, r: Tensor, b: Tensor, u: Tensor, o: Tensor, ob: Tensor) -> tuple[Tensor, ...]:
        deferred = DeferredDispatch()
        passed_on, _, _, _, weights = Route.apply(s, r, b, None, top_k, True, ColumnSums(1), None, deferred)
        fed = CombinedFeed.apply(
            passed_on, u, up_cast, None, o, out_cast, ob, weights, 2 * passed_on,
            FeedConfig(permutation, "gelu_new", False, deferred=deferred),
        )  # fmt: skip
        return (fed, weights) if weights_read else (fed,)

    def plain(s: Tensor, r: Tensor, b: Tensor, u: Tensor, o: Tensor, ob: Tensor) -> tuple[Tensor, ...]:
        weights = plain_route(s, r, b, None, top_k, True)[4]
        u, o = u + up_rounding, o + out_rounding
        rows = plain_grouped_feed(s, u, None, o, ob, None, FeedConfig(permutation, "gelu_new", False))
        fed = plain_combine(rows, weights, permutation) + 2 * s
        return (fed, weights) if weights_read else (fed,)

    assert_equal_with_gradients(fused, plain, [stream, router, bias, up, out, out_bias], dtype, roundings=4)


def test_a_router_whose_experts_get_no_gradient(device: str) -> None:
    """Such as that of a loss of the router alone."""
    stream, router = torch.randn(20, 24, device=device), torch.randn(4, 24, device=device, requires_grad=True)
    _, scores, *_ = Route.apply(stream, router, None, None, 2, True, ColumnSums(1), None, DeferredDispatch())
    (gradient,) = torch.autograd.grad(scores.sum(), router)
    torch.testing.assert_close(gradient, stream.sum(0).expand(4, -1))


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k", "width", "hidden"), [(16, 4, 384, 248), (8, 2, 384, 768)])
def test_combined_feed_at_real_size(experts: int, top_k: int, width: int, hidden: int) -> None:
    permutation = permute(choices(8192, experts, top_k, "cuda"), experts, 16)
    for variant in (False, True):
        check(permutation, (width, hidden), "gelu_new", variant, not variant, True, torch.bfloat16)
