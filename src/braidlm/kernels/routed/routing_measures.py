"""The losses and measures of routers, by one kernel for all routers of one shape and beside the head.

Most are functions of means over the real tokens; the reference of each is in `model.routing.losses`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import current_side_stream, on_side
from braidlm.model.routing.losses import Measure, evaluate_together, load, routing_loss, switch, usage
from braidlm.model.routing.routing import Routing, Routings

ELEMENTS, MAX_TOKENS, PROGRAMS, WARPS = 1024, 256, 64, 4
"""Tokens times choices of a program's block, the maximum of its tokens, a router's most programs, and their warps.

A program holds four sums of its block's size in registers: with 8192 elements it would hold them in memory.
"""
MEANS = 4


@dataclass
class Means:
    """Means of each router and choice, [R, N]."""

    probability: Tensor
    """The only mean with a gradient."""
    share: Tensor
    """Mean share of the picks with a weight above 0, of which the shares of one token sum to 1."""
    weight: Tensor
    picked: Tensor
    """Mean number of picks, whatever their weights."""


@triton.jit
def _sum_choices(  # type: ignore[no-untyped-def]
    probabilities, chosen, weights, real, sums, tokens, choices,
    TOP_K: tl.constexpr, MEANS: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    router, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    choice = tl.arange(0, CHOICES)[None, :]
    probability = tl.zeros([TOKENS, CHOICES], tl.float32)
    share = tl.zeros([TOKENS, CHOICES], tl.float32)
    weight = tl.zeros([TOKENS, CHOICES], tl.float32)
    picked = tl.zeros([TOKENS, CHOICES], tl.float32)
    for begin in range(program * TOKENS, tokens, programs * TOKENS):
        token = begin + tl.arange(0, TOKENS)
        token_mask = tl.load(real + token, mask=token < tokens, other=0) != 0
        row = (router * tokens + token).to(tl.int64)
        mask = token_mask[:, None] & (choice < choices)
        offsets = row[:, None] * choices + choice
        probability += tl.load(probabilities + offsets, mask=mask, other=0.0).to(tl.float32)
        counted = tl.zeros([TOKENS], tl.float32)
        for k in tl.static_range(TOP_K):
            w = tl.load(weights + row * TOP_K + k, mask=token_mask, other=0.0).to(tl.float32)
            counted += tl.where(w > 0, 1.0, 0.0)
        share_of_one = 1.0 / tl.maximum(counted, 1.0)
        for k in tl.static_range(TOP_K):
            w = tl.load(weights + row * TOP_K + k, mask=token_mask, other=0.0).to(tl.float32)
            selected = tl.load(chosen + row * TOP_K + k, mask=token_mask, other=-1)[:, None] == choice
            picked += tl.where(selected, 1.0, 0.0)
            weight += tl.where(selected, w[:, None], 0.0)
            share += tl.where(selected & (w > 0)[:, None], share_of_one[:, None], 0.0)
    choice = tl.arange(0, CHOICES)
    sums += (router * programs + program) * MEANS * choices + choice
    tl.store(sums, tl.sum(probability, 0), mask=choice < choices)
    tl.store(sums + choices, tl.sum(share, 0), mask=choice < choices)
    tl.store(sums + 2 * choices, tl.sum(weight, 0), mask=choice < choices)
    tl.store(sums + 3 * choices, tl.sum(picked, 0), mask=choice < choices)


class ChoiceMeans(torch.autograd.Function):
    """real [B, T], and of R routers all probabilities [B, T, N], all chosen [B, T, K], all weights -> [R, 4, N]."""

    @staticmethod
    def forward(ctx: Any, routers: int, real_BT: Tensor, *parts: Tensor) -> Tensor:
        probabilities, chosen, weights = (
            torch.stack(parts[begin : begin + routers]) for begin in range(0, 3 * routers, routers)
        )
        tokens, choices = real_BT.numel(), probabilities.shape[-1]
        programs = min(PROGRAMS, triton.cdiv(tokens, block_tokens(choices)))
        sums = torch.empty(routers, programs, MEANS, choices, dtype=torch.float32, device=real_BT.device)
        _sum_choices[(routers, programs)](
            probabilities, chosen, weights, real_BT.contiguous().view(torch.uint8), sums, tokens, choices,
            chosen.shape[-1], MEANS, block_tokens(choices), triton.next_power_of_2(choices), num_warps=WARPS,
        )  # fmt: skip
        count = real_BT.sum().clamp_min(1)
        ctx.save_for_backward(real_BT, count)
        ctx.routers = routers
        return sums.sum(1) / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        real_BT, count = ctx.saved_tensors
        probability_gradient = (gradient[:, 0] / count)[:, None, None, :] * real_BT[..., None]
        return None, None, *probability_gradient.unbind(), *[None] * (2 * ctx.routers)


def block_tokens(choices: int) -> int:
    """Tokens of a program's block."""
    return max(1, min(MAX_TOKENS, ELEMENTS // triton.next_power_of_2(choices)))


def choice_means(alike: list[Routing], real_BT: Tensor) -> Means:
    """The means of routings of one shape; `real_BT` says which tokens count."""
    names = ("probabilities_BTN", "chosen_BTK", "weights_BTK")
    parts = [getattr(routing, name) for name in names for routing in alike]
    return Means(*ChoiceMeans.apply(len(alike), real_BT.bool(), *parts).unbind(1))


OF_MEANS: dict[Measure, Callable[[Means], Tensor]] = {
    switch: lambda means: means.probability.shape[-1] * (means.probability * means.share).sum(-1),
    usage: lambda means: means.weight / means.weight.sum(-1, keepdim=True).clamp_min(1e-9),
    load: lambda means: means.picked / means.picked.sum(-1, keepdim=True).clamp_min(1e-9),
}
"""The measures of a routing that are functions of its means."""


def evaluate_means(measure: Measure, alike: list[Routing], real_BT: Tensor) -> Tensor:
    """A measure of every routing, from the means where it is a function of them."""
    if measure not in OF_MEANS or alike[0].present_BT is not None:  # the means are of the same tokens for all
        return evaluate_together(measure, alike, real_BT)
    return OF_MEANS[measure](choice_means(alike, real_BT))


READ = ("probabilities_BTN", "weights_BTK", "scores_BTN", "new_rows")
"""The fields of a routing through which a loss has gradients."""


class RoutingLoss(torch.autograd.Function):
    """Routings, real tokens, the tokens of the whole batch, all differentiable tensors of the routings -> the loss.

    The loss and its gradient are complete when the side stream is synchronized.
    """

    @staticmethod
    def forward(ctx: Any, routings: Routings, real_BT: Tensor, count: Tensor | float | None, *parts: Tensor) -> Tensor:
        with on_side(current_side_stream(), real_BT, *parts, priority=True), torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in parts]
            share = 1.0 if count is None else real_BT.sum() / count
            loss = routing_loss(_with_parts(routings, leaves), real_BT, evaluate_means) * share
            gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        ctx.present = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = iter(torch._foreach_mul(list(ctx.saved_tensors), upstream) if ctx.saved_tensors else ())
        return *[None] * 3, *(next(scaled) if present else None for present in ctx.present)


def routing_loss_on_side(routings: Routings, real_BT: Tensor, count: Tensor | float | None) -> Tensor:
    """`RoutingLoss` with the tensors of the routings."""
    parts = [getattr(routing, name) for routing in routings for name in READ]
    return RoutingLoss.apply(routings, real_BT, count, *(part for part in parts if part is not None))


def _with_parts(routings: Routings, parts: list[Tensor]) -> Routings:
    """The routings with other tensors."""
    remaining: Iterator[Any] = iter(parts)
    return tuple(
        replace(routing, **{name: next(remaining) for name in READ if getattr(routing, name) is not None})
        for routing in routings
    )
