"""Clipping and the steps of all of a model's optimizers, by few passes over memory; and that of AdamW.

The reference is `clip_grad_norm_`, a product of the weights with their factors, and `step()` of each optimizer. The
optimizers stay torch's own: their state is updated in place, so that checkpoints do not change.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from braidlm.kernels.optimizers.gradient_norm import (
    AddressTable,
    GradientNorm,
    address,
    chunks_of,
    clip_factor,
    factors_of,
    number,
)
from braidlm.kernels.optimizers.muon import BatchedMuon, FusedMuon
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import SideStream, on_side

BLOCK, WARPS = 4096, 8
COLUMNS = 8
"""Columns of the table: addresses of weight, gradient, both moments, learning rate, step and factor of the weight, and
the number of elements."""


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, decays, chunks, norm, clip, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, CLIPS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.load(chunks + 2 * tl.program_id(0))
    offsets = tl.load(chunks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    entry = table + index * COLUMNS
    weights, gradients = address(entry, ALIGNED), address(entry + 1, ALIGNED)
    exp_avgs, exp_avg_sqs = address(entry + 2, ALIGNED), address(entry + 3, ALIGNED)
    lr = number(entry + 4)
    size = tl.load(entry + 7)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    mask = offsets < size
    step = number(entry + 5)
    correction1 = 1.0 - tl.exp(step * tl.log(BETA1))
    correction2 = tl.sqrt(1.0 - tl.exp(step * tl.log(BETA2)))
    gradient = tl.load(gradients + offsets, mask=mask, other=0.0)
    if CLIPS:
        gradient *= clip_factor(norm, clip)
    weight = tl.load(weights + offsets, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avgs + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sqs + offsets, mask=mask, other=0.0)
    factor = number(entry + 6)
    weight *= (1.0 - lr * tl.load(decays + index)) * factor
    exp_avg += (1.0 - BETA1) * (gradient - exp_avg)
    exp_avg_sq = BETA2 * exp_avg_sq + (1.0 - BETA2) * gradient * gradient
    weight -= (lr / correction1) * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
    tl.store(weights + offsets, weight, mask=mask)
    tl.store(exp_avgs + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sqs + offsets, exp_avg_sq, mask=mask)


class FusedAdamW:
    """The steps of an AdamW of torch, on the state that it keeps; learning rates are tensors on the device."""

    def __init__(self, optimizer: optim.AdamW, factors: Mapping[Tensor, Tensor]):
        self.optimizer = optimizer
        self.groups = [group for group in optimizer.param_groups for _ in group["params"]]
        self.parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self.table = AddressTable(len(self.parameters), COLUMNS, device)
        self.decays = torch.tensor([float(group["weight_decay"]) for group in self.groups], device=device)
        self.factors = factors_of(self.parameters, factors)
        self.chunks = chunks_of(self.parameters, BLOCK)

    def counts(self) -> list[Tensor | None]:
        """The number of steps of each parameter, which this step reads and whoever measures the norm has increased."""
        return [self.optimizer.state[p]["step"] for p in self.parameters]

    def step(self, norm: Tensor, clip: float | None) -> None:
        """Update the parameters by gradients that are scaled down if the norm is above `clip`."""
        states = [self.optimizer.state[p] for p in self.parameters]
        rows = [
            [*(t.data_ptr() for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"], group["lr"], s["step"], f)), p.numel()]
            for group, p, s, f in zip(self.groups, self.parameters, states, self.factors, strict=True)
        ]
        aligned = all(value % 16 == 0 for row in rows for value in row[:4]) and all(row[-1] % 4 == 0 for row in rows)
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        _adamw[(len(self.chunks),)](
            self.table.write(rows), self.decays, self.chunks, norm, clip or 0.0, group["eps"],
            beta1, beta2, clip is not None, aligned, COLUMNS, BLOCK, num_warps=WARPS,
        )  # fmt: skip


FUSED: dict[type, Any] = {optim.AdamW: FusedAdamW, BatchedMuon: FusedMuon}
"""What steps for an optimizer of exactly that class."""


class FusedStep:
    """The steps of optimizers whose learning rates are tensors on the device."""

    def __init__(self, optimizers: Sequence[optim.Optimizer], factors: Mapping[Tensor, Tensor] | None = None):
        """`factors` are numbers on the device; each step multiplies the parameter by its own before the update."""
        self.optimizers = optimizers
        self.parts = [FUSED[type(optimizer)](optimizer, factors or {}) for optimizer in optimizers]
        parameters = [p for part in self.parts for p in part.parameters]
        self.norm = GradientNorm(parameters)
        self.side = SideStream(parameters[0].device) if parameters[0].is_cuda else None

    @staticmethod
    def serves(optimizers: Sequence[optim.Optimizer]) -> bool:
        return all(type(optimizer) in FUSED for optimizer in optimizers)

    @property
    def ready(self) -> bool:
        """Whether the optimizers have made their state (in their own first step) and all has the form kernels read."""
        return all(
            p.grad is not None and len(optimizer.state[p]) and _is_plain(p) and _is_plain(p.grad)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )

    @torch.no_grad()
    def step(self, clip: float | None) -> Tensor:
        """Update the parameters; return the norm of all gradients, which are scaled down if it is above `clip`."""
        norm = self.norm.measure([count for part in self.parts for count in part.counts()])
        *others, last = self.parts
        for part in others:  # AdamW waits for memory while Muon multiplies
            with on_side(self.side, norm):
                part.step(norm, clip)
        last.step(norm, clip)
        if self.side is not None:
            self.side.synchronize()
        return norm

    def write_addresses(self) -> None:
        """After a capture, write the addresses that the captured step reads in each replay."""
        for part in (self.norm, *self.parts):
            part.table.write_captured()


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()
