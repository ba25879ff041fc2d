"""What routers of one shape chose, averaged over the real tokens: all their losses and readings need of most of them.

One kernel goes over the choices of all routers. The reference of each mean is in `routing_losses`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.model.routing.routing import Routing

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

TOKENS, PROGRAMS, WARPS = 256, 16, 4
"""Tokens that a program looks at together, and programs for each router."""
MEANS = 4


@dataclass
class Means:
    """Of each router and choice, [R, N]."""

    probability: Tensor
    """Only this one has a gradient."""
    share: Tensor
    """Of a token's picks that count, which are 1 together."""
    weight: Tensor
    picked: Tensor
    """How often, whatever it counts."""


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
        counts = tl.load(real + token, mask=token < tokens, other=0) != 0
        at = (router * tokens + token).to(tl.int64)
        inside = counts[:, None] & (choice < choices)
        offsets = at[:, None] * choices + choice
        probability += tl.load(probabilities + offsets, mask=inside, other=0.0).to(tl.float32)
        weighed = tl.zeros([TOKENS], tl.float32)
        for k in tl.static_range(TOP_K):
            w = tl.load(weights + at * TOP_K + k, mask=counts, other=0.0).to(tl.float32)
            weighed += tl.where(w > 0, 1.0, 0.0)
        each = 1.0 / tl.maximum(weighed, 1.0)
        for k in tl.static_range(TOP_K):
            w = tl.load(weights + at * TOP_K + k, mask=counts, other=0.0).to(tl.float32)
            here = tl.load(chosen + at * TOP_K + k, mask=counts, other=-1)[:, None] == choice
            picked += tl.where(here, 1.0, 0.0)
            weight += tl.where(here, w[:, None], 0.0)
            share += tl.where(here & (w > 0)[:, None], each[:, None], 0.0)
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
        sums = torch.empty(routers, PROGRAMS, MEANS, choices, dtype=torch.float32, device=real_BT.device)
        _sum_choices[(routers, PROGRAMS)](
            probabilities, chosen, weights, real_BT.contiguous().view(torch.uint8), sums, tokens, choices,
            chosen.shape[-1], MEANS, TOKENS, triton.next_power_of_2(choices), num_warps=WARPS,
        )  # fmt: skip
        count = real_BT.sum().clamp_min(1)
        ctx.save_for_backward(real_BT, count)
        ctx.routers = routers
        return sums.sum(1) / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        real_BT, count = ctx.saved_tensors
        made = (gradient[:, 0] / count)[:, None, None, :] * real_BT[..., None]
        return None, None, *made.unbind(), *[None] * (2 * ctx.routers)


def choice_means(alike: list[Routing], real_BT: Tensor) -> Means:
    """Of routings of one shape; `real_BT` says which tokens count."""
    names = ("probabilities_BTN", "chosen_BTK", "weights_BTK")
    parts = [getattr(routing, name) for name in names for routing in alike]
    return Means(*ChoiceMeans.apply(len(alike), real_BT.bool(), *parts).unbind(1))
