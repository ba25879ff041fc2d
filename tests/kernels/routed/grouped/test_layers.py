"""Linear and feed-forward layers of experts against torch's operations."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.routed.combine import Combine
from braidlm.kernels.routed.grouped.layers import FeedConfig, GroupedFeed, GroupedLinear, plain_grouped_feed
from braidlm.kernels.routed.grouped.products import plain_grouped
from braidlm.kernels.routed.permutation import Permutation, permute
from braidlm.kernels.side_stream import SideStream, use_side_stream
from tests.kernels.comparison import assert_equal_with_gradients, captured, dropout_factors
from tests.kernels.sorted_rows import CASES, choices, matrices, permuted, real_rows, with_padding


def on(side: SideStream | None, layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The layer with weight gradients on a side stream, which is synchronized when its input gets a gradient."""
    if side is None:
        return layer

    def work(rows: Tensor, *others: Tensor | None) -> Tensor:
        rows = rows.clone()
        rows.register_hook(lambda _: side.synchronize())
        with use_side_stream(side):
            return layer(rows, *others)

    return work


def check_linear(
    permutation: Permutation, sizes: tuple[int, int], gather: bool, biased: bool, dtype: torch.dtype, side: Any = None
) -> None:
    device, real, tokens = str(permutation.source.device), real_rows(permutation), len(permutation.row_of_choice)
    weight, cast, rounding = matrices(permutation.experts, *sizes, dtype=dtype, device=device)
    rows = torch.randn(tokens if gather else len(real), sizes[0], device=device).to(dtype)
    bias = torch.randn(permutation.experts, sizes[1], device=device) if biased else None

    def fused(r: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return GroupedLinear.apply(with_padding(r, permutation, gather), w, cast, b, permutation, gather)[real]

    def plain(r: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return plain_grouped(with_padding(r, permutation, gather), w + rounding, permutation, b, gather)[real]

    assert_equal_with_gradients(on(side, fused), plain, [rows, weight, bias], dtype)


def check_feed(
    permutation: Permutation,
    sizes: tuple[int, int],
    kind: str,
    gated: bool,
    gather: bool,
    dtype: torch.dtype,
    side: Any = None,
    dropout: DropoutUse = NO_DROPOUT,
) -> None:
    """The variants also differ in their biases, and in whether the output is added to a base."""
    device, real, tokens = str(permutation.source.device), real_rows(permutation), len(permutation.row_of_choice)
    experts, (width, hidden) = permutation.experts, sizes
    config = FeedConfig(permutation, kind, gated, gather, inner_dropout=dropout)
    inner = 2 * hidden if gated else hidden
    up, up_cast, up_rounding = matrices(experts, width, inner, dtype=dtype, device=device)
    out, out_cast, out_rounding = matrices(experts, hidden, width, dtype=dtype, device=device)
    rows = torch.randn(tokens if gather else len(real), width, device=device).to(dtype)
    bias = torch.randn(experts, inner, device=device) if gated == gather else None
    out_bias = torch.randn(experts, width, device=device) if gated else None
    base = torch.randn(len(real), width, device=device).to(dtype) if gather else None

    def run(function: Callable[..., Tensor], dropped: list[Any], r: Tensor, *weights: Any) -> Tensor:
        *weights, base = weights
        base = base if base is None else with_padding(base, permutation, False)
        return function(with_padding(r, permutation, gather), *weights, base, config, *dropped)[real]

    def fused(r: Tensor, u: Tensor, b: Any, o: Tensor, ob: Any, base: Any) -> Tensor:
        return run(GroupedFeed.apply, [], r, u, up_cast, b, o, out_cast, ob, base)

    def plain(r: Tensor, u: Tensor, b: Any, o: Tensor, ob: Any, base: Any) -> Tensor:
        factors = dropout_factors(dropout, permutation.rows, hidden)
        return run(plain_grouped_feed, [factors], r, u + up_rounding, b, o + out_rounding, ob, base)

    assert_equal_with_gradients(on(side, fused), plain, [rows, up, bias, out, out_bias, base], dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gather", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_grouped_linear_equals_torch(case: str, gather: bool, biased: bool, device: str, dtype: torch.dtype) -> None:
    check_linear(permuted(case, device)[0], (24, 40), gather, biased, dtype)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("gather", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("top 1, an empty expert", "gelu_new"),
        ("all", "gelu_new"),
        ("top 2, an empty expert", "gelu"),
        ("top 2", "relu"),
        ("top 2", "silu"),
    ],
)
def test_grouped_feed_equals_torch(
    case: str, kind: str, gated: bool, gather: bool, device: str, dtype: torch.dtype
) -> None:
    check_feed(permuted(case, device)[0], (24, 40), kind, gated, gather, dtype)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_grouped_feed_with_dropout_of_activations(gated: bool, device: str, dtype: torch.dtype) -> None:
    dropout = DropoutUse(0.25, torch.tensor([7], device=device))
    check_feed(permuted("top 2", device)[0], (24, 40), "gelu_new", gated, not gated, dtype, dropout=dropout)


@pytest.mark.gpu
@pytest.mark.parametrize("on_side", [False, True], ids=["", "side stream"])
@pytest.mark.parametrize(("experts", "width", "hidden"), [(4, 192, 768), (8, 384, 768)])
def test_grouped_layers_at_real_size(experts: int, width: int, hidden: int, on_side: bool) -> None:
    side = SideStream(torch.device("cuda")) if on_side else None
    permutation = permute(choices(8192, experts, 2, "cuda"), experts, 16)
    for gather in (False, True):
        for variant in (False, True):
            check_linear(permutation, (width, 3 * width), gather, variant, torch.bfloat16, side)
            check_feed(permutation, (width, hidden), "gelu_new", variant, gather, torch.bfloat16, side)


@pytest.mark.gpu
def test_a_pass_through_experts_replays_as_a_graph() -> None:
    """The choices change between replays, and the host is never waited for."""
    experts, width, hidden, dtype = 4, 64, 128, torch.bfloat16
    up, up_cast, _ = matrices(experts, width, hidden, dtype=dtype, device="cuda")
    out, out_cast, _ = matrices(experts, hidden, width, dtype=dtype, device="cuda")
    tokens = torch.randn(1024, width, device="cuda").to(dtype).requires_grad_()
    chosen, weights = choices(1024, experts, 2, "cuda"), torch.rand(1024, 2, device="cuda")
    up.requires_grad_(), out.requires_grad_()

    def work() -> tuple[Tensor, ...]:
        permutation = permute(chosen, experts, 2)
        config = FeedConfig(permutation, "gelu_new", False)
        rows = GroupedFeed.apply(tokens, up, up_cast, None, out, out_cast, None, None, config)
        combined = Combine.apply(rows, weights, permutation)
        return combined, *torch.autograd.grad(combined.float().square().sum(), [tokens, up, out])

    graph, replayed = captured(work)
    for _ in range(2):
        chosen.copy_(choices(1024, experts, 2, "cuda", empty=1))
        graph.replay()
        for ours, theirs in zip(replayed, work(), strict=True):
            assert torch.equal(ours, theirs)
