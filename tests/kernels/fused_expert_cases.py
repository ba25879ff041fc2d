"""Checks of the kernels for expert banks against torch's own operations in float64: outputs and every gradient.

Run as a script in Triton's interpreter (`TRITON_INTERPRET=1`), or called by tests on a device.
"""

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any

import torch
from fused_cases import LIMITS, close, compare
from torch import Tensor

from braidlm.kernels.ops.cast import cast_all
from braidlm.kernels.routed.combine import Combine, plain_combine, summed_rows
from braidlm.kernels.routed.grouped_layers import GroupedFeed, GroupedLinear, plain_grouped_feed
from braidlm.kernels.routed.grouped_products import (
    Blocks,
    grouped_backward,
    grouped_forward,
    plain_grouped,
)
from braidlm.kernels.routed.grouped_weights import Cut, grouped_weight_gradient
from braidlm.kernels.routed.permutation import Permutation, permute, plain_permute
from braidlm.kernels.routed.project_rows import WIDEST, ProjectAddNormRows
from braidlm.kernels.routed.rows import AddNormRows, Norm, plain_add_norm_rows
from braidlm.kernels.side_stream import DeferredGradient, SideStream, use_side_stream

SMALL_TILE = 16


def choices(tokens: int, experts: int, top_k: int, device: str, empty: int | None = None) -> Tensor:
    """Different experts for each token, some far more often than others, one perhaps never."""
    favour = torch.linspace(0, 2, experts, device=device)
    if empty is not None:
        favour[empty] = -torch.inf
    scores = torch.randn(tokens, experts, device=device) + favour
    return scores.topk(top_k).indices


def permutations(device: str) -> Iterator[tuple[Permutation, Tensor]]:
    """Small ones of every kind, with what the tokens chose."""
    for experts, top_k, empty in ((3, 1, 2), (3, 3, None), (4, 2, 0), (5, 2, None)):
        chosen = choices(22, experts, top_k, device, empty)
        yield plain_permute(chosen, experts, 2, SMALL_TILE), chosen


def check_placing(device: str, sizes: str) -> None:
    small = [(3, 7, 4, 2), (2, 40, 5, 1), (1, 1, 3, 3), (2, 33, 8, 8), (70, 3, 3, 2)]
    large = [(16, 512, 4, 2), (128, 512, 8, 2), (8, 1000, 64, 8)]
    for batch, length, experts, top_k in {"small": small, "large": large}[sizes]:
        for tile, dtype, empty in (
            (16, torch.int64, None),
            (128, torch.int32, experts // 2 if top_k < experts else None),
        ):
            chosen = choices(batch * length, experts, top_k, device, empty).to(dtype)
            if batch > 2:
                chosen[:length] = chosen[:1]  # a sequence whose tokens all go to the same experts
            found, wanted = permute(chosen, experts, batch, tile), plain_permute(chosen, experts, batch, tile)
            again = permute(chosen, experts, batch, tile)
            for field in fields(Permutation):
                ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
                what = f"{field.name} of {batch} x {length}, {top_k} of {experts}, {tile=}"
                if isinstance(ours, Tensor):
                    assert ours.dtype == theirs.dtype, what
                    assert torch.equal(ours, theirs), what
                    assert torch.equal(ours, getattr(again, field.name)), what
                else:
                    assert ours == theirs


def check_plain_permutation() -> None:
    """The reference itself, on numbers worked out by hand."""
    made = plain_permute(torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0]]), 4, 2, tile=2)
    assert made.source.tolist() == [0, 2, 3, -1, 1, -1, 0, 1, 2, 3, -1, -1]
    assert made.row_of_choice.tolist() == [[6, 0], [7, 4], [1, 8], [9, 2]]
    assert made.tile_expert.tolist() == [0, 0, 1, 2, 2, -1]
    assert made.starts.tolist() == [0, 4, 6, 10, 10]
    assert made.begins.tolist() == [[0, 1, 3], [4, 5, 5], [6, 8, 10], [10, 10, 10]]
    assert made.routed.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]


def matrices(*shape: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A parameter, its copy, and what must be added to the first to have the second exactly."""
    weight = torch.randn(*shape, device=device) * shape[-2] ** -0.5
    copy = cast_all([weight], dtype)[weight]
    return weight, copy, copy.double() - weight.double()


def real_rows(permutation: Permutation) -> Tensor:
    """Taking only these gives padding a gradient of zeros."""
    return (permutation.source >= 0).nonzero().flatten()


def laid_out(rows: Tensor, permutation: Permutation, gather: bool) -> Tensor:
    """Tokens stay what they are; real rows are put among padding of some finite numbers."""
    if gather:
        return rows
    return rows.new_full((permutation.rows, rows.shape[1]), 0.7).index_copy(0, real_rows(permutation), rows)


def check_linear(
    device: str, dtype: torch.dtype, permutation: Permutation, inputs: int, outputs: int, side: Any = None
) -> None:
    real, experts, tokens = real_rows(permutation), permutation.experts, len(permutation.row_of_choice)
    for gather, biased in product((False, True), (False, True)):
        weight, copy, rest = matrices(experts, inputs, outputs, dtype=dtype, device=device)
        rows = torch.randn(tokens if gather else len(real), inputs, device=device).to(dtype)
        bias = torch.randn(experts, outputs, device=device) if biased else None

        def fused(r: Tensor, w: Tensor, b: Tensor | None, copy: Tensor = copy, gather: bool = gather) -> Tensor:
            r = laid_out(r, permutation, gather)
            with use_side_stream(side):
                return GroupedLinear.apply(r, w, copy, b, permutation, gather)[real]

        def plain(r: Tensor, w: Tensor, b: Tensor | None, rest: Tensor = rest, gather: bool = gather) -> Tensor:
            r = laid_out(r, permutation, gather)
            return plain_grouped(r, w + rest, permutation, b, gather)[real]

        compare(joined(fused, side), plain, [rows, weight, bias], dtype, f"linear {gather=} {biased=}")


def check_feed(
    device: str,
    dtype: torch.dtype,
    permutation: Permutation,
    sizes: tuple[int, int],
    kinds: tuple[str, ...],
    side: Any = None,
) -> None:
    real, experts, tokens, (width, hidden) = (
        real_rows(permutation),
        permutation.experts,
        len(permutation.row_of_choice),
        sizes,
    )
    for kind, gated, gather in product(kinds, (False, True), (False, True)):
        biased = gated == gather
        wide = 2 * hidden if gated else hidden
        up, up_copy, up_rest = matrices(experts, width, wide, dtype=dtype, device=device)
        out, out_copy, out_rest = matrices(experts, hidden, width, dtype=dtype, device=device)
        rows = torch.randn(tokens if gather else len(real), width, device=device).to(dtype)
        bias = torch.randn(experts, wide, device=device) if biased else None
        out_bias = torch.randn(experts, width, device=device) if gated else None
        base = torch.randn(len(real), width, device=device).to(dtype) if gather else None

        def fused(
            r: Tensor, u: Tensor, b: Tensor | None, o: Tensor, ob: Tensor | None, base: Tensor | None,
            copies: tuple[Tensor, Tensor] = (up_copy, out_copy), config: tuple[Any, ...] = (kind, gated, gather),
        ) -> Tensor:  # fmt: skip
            r = laid_out(r, permutation, config[-1])
            base = base if base is None else laid_out(base, permutation, False)
            with use_side_stream(side):
                return GroupedFeed.apply(r, u, copies[0], b, o, copies[1], ob, base, permutation, *config)[real]

        def plain(
            r: Tensor, u: Tensor, b: Tensor | None, o: Tensor, ob: Tensor | None, base: Tensor | None,
            rests: tuple[Tensor, Tensor] = (up_rest, out_rest), config: tuple[Any, ...] = (kind, gated, gather),
        ) -> Tensor:  # fmt: skip
            r = laid_out(r, permutation, config[-1])
            base = base if base is None else laid_out(base, permutation, False)
            return plain_grouped_feed(r, u + rests[0], b, o + rests[1], ob, base, permutation, *config)[real]

        inputs = [rows, up, bias, out, out_bias, base]
        compare(joined(fused, side), plain, inputs, dtype, f"feed {kind=} {gated=} {gather=}")


def check_project_rows(device: str, dtype: torch.dtype, permutation: Permutation, inputs: int, width: int) -> None:
    """With the stream's gradient returned and left; what is dropped is what the two steps drop."""
    real, experts, tokens = real_rows(permutation), permutation.experts, len(permutation.row_of_choice)
    stream = torch.randn(tokens, width, device=device).to(dtype)
    for centred, biased, owing in product((False, True), (False, True), (False, True)):
        weight, copy, rest = matrices(experts, inputs, width, dtype=dtype, device=device)
        rows = torch.randn(len(real), inputs, device=device).to(dtype)
        bias = torch.randn(experts, width, device=device) if biased else None
        norm = Norm(1e-5, centred, deferred=DeferredGradient() if owing else None)

        def fused(
            r: Tensor, w: Tensor, b: Tensor | None, s: Tensor, copy: Tensor = copy, norm: Norm = norm
        ) -> tuple[Tensor, ...]:
            s = s if norm.deferred is None else Taken.apply(s, norm.deferred)
            made = ProjectAddNormRows.apply(laid_out(r, permutation, False), w, copy, b, s, permutation, norm)
            return made[0][real], made[1][real]

        def plain(
            r: Tensor, w: Tensor, b: Tensor | None, s: Tensor, rest: Tensor = rest, centred: bool = centred
        ) -> tuple[Tensor, ...]:
            delta = plain_grouped(laid_out(r, permutation, False), w + rest, permutation, b)
            made = plain_add_norm_rows(s, delta, permutation, 1e-5, centred)
            return made[0][real], made[1][real]

        compare(fused, plain, [rows, weight, bias, stream], dtype, f"projected rows {centred=} {biased=} {owing=}")
    norm, rows = Norm(1e-5, True, 0.25, torch.tensor([5], device=device)), laid_out(rows, permutation, False)
    found = ProjectAddNormRows.apply(rows, weight, copy, bias, stream, permutation, norm)
    delta = GroupedLinear.apply(rows, weight, copy, bias, permutation, False)
    for one, other in zip(found, AddNormRows.apply(stream, delta, permutation, norm), strict=True):
        close(one[real], other[real].double(), LIMITS[dtype], "projected rows, dropped")


class Taken(torch.autograd.Function):
    """A tensor whose gradient was left for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deferred: DeferredGradient) -> Tensor:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None]:
        assert gradient is None
        return ctx.deferred.read(), None


def joined(work: Any, side: Any) -> Any:
    """Gradients that were made side are read only after they are joined: a hook on what comes in does that."""
    if side is None:
        return work

    def whole(rows: Tensor, *others: Tensor | None) -> Tensor:
        rows = rows.clone()
        rows.register_hook(lambda _: side.synchronize())
        return work(rows, *others)

    return whole


def check_mix(device: str, dtype: torch.dtype, permutation: Permutation, chosen: Tensor, width: int) -> None:
    rows = torch.randn(len(real_rows(permutation)), width, device=device).to(dtype)
    weights = torch.rand(chosen.shape, device=device)
    compare(
        lambda r, w: Combine.apply(laid_out(r, permutation, False), w, permutation),
        lambda r, w: plain_combine(laid_out(r, permutation, False), w, permutation),
        [rows, weights],
        dtype,
        f"mix {width=}",
    )
    rows = laid_out(rows, permutation, False)
    leaf = rows.clone().requires_grad_()
    gradient = torch.randn(len(chosen), width, device=device).to(dtype)
    Combine.apply(leaf, weights, permutation).backward(gradient)
    used = int(permutation.starts[-1])
    padding = leaf.grad[:used][permutation.source[:used] < 0]
    assert torch.equal(padding, torch.zeros_like(padding)), "padding rows must have a gradient of zeros"
    close(
        summed_rows(rows, permutation),
        plain_combine(rows.double(), torch.ones_like(weights), permutation),
        LIMITS[dtype],
        "the sum of a token's rows",
    )


def check_unread(device: str, dtype: torch.dtype) -> None:
    """What lies beyond the last used tile is read by nobody: here it is no number, and no result shows it."""
    permutation = plain_permute(torch.ones(10, 1, dtype=torch.long, device=device), 3, 1, SMALL_TILE)
    used = int(permutation.starts[-1])
    assert used < permutation.rows
    rows, gradient = (torch.randn(permutation.rows, 24, device=device).to(dtype) for _ in range(2))
    rows[used:], gradient[used:] = torch.nan, torch.nan
    gradient[10:used] = 0
    weight = torch.randn(3, 24, 24, device=device).to(dtype)
    value, inner = grouped_forward(rows, weight, permutation, activation="relu")
    assert inner is not None
    before, _ = grouped_backward(gradient, weight, permutation, inner, "relu")
    weights, bias = grouped_weight_gradient(rows, gradient, permutation, bias=True)
    assert bias is not None
    for made in (value[:used], before[:used], weights, bias, summed_rows(rows, permutation)):
        assert made.isfinite().all()
    for unused in (0, 2):
        assert not weights[unused].any(), "an expert without rows has a gradient of zeros"
        assert not bias[unused].any()


def check_blocks(device: str, dtype: torch.dtype) -> None:
    """Blocks of every shape give the same, also those that do not divide the matrices."""
    permutation = plain_permute(choices(60, 3, 2, device), 3, 2, 32)
    real = real_rows(permutation)
    rows, weight = torch.randn(permutation.rows, 40, device=device).to(dtype), torch.randn(3, 40, 72, device=device)
    gradient = torch.zeros(permutation.rows, 72, device=device).to(dtype)
    gradient[real] = torch.randn(len(real), 72, device=device).to(dtype)
    weight = weight.to(dtype)
    wanted = plain_grouped(rows.double(), weight.double(), permutation)
    wanted_back = plain_grouped(gradient.double(), weight.double().transpose(1, 2), permutation)
    owner = permutation.tile_expert.repeat_interleave(permutation.tile)
    tokens = torch.randn(60, 40, device=device).to(dtype)
    wanted_weights, wanted_gathered = (
        torch.stack([read[owner == e].double().t() @ gradient[owner == e].double() for e in range(3)])
        for read in (rows, tokens[permutation.source.clamp_min(0).long()])
    )
    for blocks in (Blocks(16, 32, 16, 4, 2), Blocks(32, 16, 32, 4, 3), Blocks(64, 64, 32, 4, 2)):
        made, _ = grouped_forward(rows, weight, permutation, blocks=blocks)
        close(made[real], wanted[real], LIMITS[dtype], f"forward with {blocks}")
        back, _ = grouped_backward(gradient, weight, permutation, blocks=blocks)
        close(back[real], wanted_back[real], LIMITS[dtype], f"backward with {blocks}")
        wanted_bias = torch.stack([gradient[owner == e].double().sum(0) for e in range(3)])
        for parts, turned in product((1, 2, 3), (False, True)):
            cut = Cut(blocks, parts, turned)
            weights, bias = grouped_weight_gradient(rows, gradient, permutation, bias=True, cut=cut)
            close(weights, wanted_weights, LIMITS[dtype], f"gradient of the weight with {cut}")
            assert bias is not None
            close(bias, wanted_bias, LIMITS[dtype], f"gradient of the bias with {cut}")
            gathered, _ = grouped_weight_gradient(tokens, gradient, permutation, gather=True, cut=cut)
            close(gathered, wanted_gathered, LIMITS[dtype], f"gradient of the weight of tokens with {cut}")


def check_small(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_plain_permutation()
    check_placing(device, "small")
    for permutation, chosen in permutations(device):
        check_linear(device, dtype, permutation, 24, 40)
        if permutation.experts < 5:
            check_feed(device, dtype, permutation, (24, 40), ("gelu_new",))
        check_mix(device, dtype, permutation, chosen, 24)
    check_feed(device, dtype, permutation, (16, 32), ("relu", "silu"))
    check_feed(device, dtype, plain_permute(chosen[:4], 5, 1, SMALL_TILE), (16, 32), ("gelu",))
    for inputs, width in ((16, 16), (40, 24), (32, 200)):
        check_project_rows(device, dtype, permutation, inputs, width)
    check_unread(device, dtype)
    check_blocks(device, dtype)


def check_large() -> None:
    """Real sizes, in bf16, with a second stream."""
    torch.manual_seed(0)
    check_placing("cuda", "large")
    side = SideStream(torch.device("cuda"))
    for experts, width, hidden in ((4, 192, 768), (8, 384, 768)):
        chosen = choices(8192, experts, 2, "cuda")
        permutation = permute(chosen, experts, 16)
        for stream in (None, side):
            check_linear("cuda", torch.bfloat16, permutation, width, 3 * width, stream)
            check_feed("cuda", torch.bfloat16, permutation, (width, hidden), ("gelu_new",), stream)
        check_mix("cuda", torch.bfloat16, permutation, chosen, width)
        if width <= WIDEST:
            check_project_rows("cuda", torch.bfloat16, permutation, width, width)


def check_replay() -> None:
    """A whole pass as a CUDA graph: what is chosen changes between replays, and nothing is asked of the host."""
    torch.manual_seed(0)
    experts, width, hidden, dtype = 4, 64, 128, torch.bfloat16
    up, up_copy, _ = matrices(experts, width, hidden, dtype=dtype, device="cuda")
    out, out_copy, _ = matrices(experts, hidden, width, dtype=dtype, device="cuda")
    tokens = torch.randn(1024, width, device="cuda").to(dtype).requires_grad_()
    chosen, weights = choices(1024, experts, 2, "cuda"), torch.rand(1024, 2, device="cuda")
    up.requires_grad_(), out.requires_grad_()

    def work() -> tuple[Tensor, ...]:
        permutation = permute(chosen, experts, 2)
        made = GroupedFeed.apply(
            tokens, up, up_copy, None, out, out_copy, None, None, permutation, "gelu_new", False, True
        )  # fmt: skip
        mixed = Combine.apply(made, weights, permutation)
        return mixed, *torch.autograd.grad(mixed.float().square().sum(), [tokens, up, out])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for _ in range(2):
        chosen.copy_(choices(1024, experts, 2, "cuda", empty=1))
        graph.replay()
        for ours, theirs in zip(made, work(), strict=True):
            assert torch.equal(ours, theirs), "a replay gives the same numbers"


if __name__ == "__main__":
    check_small("cpu", torch.float32)
    print("equal")
