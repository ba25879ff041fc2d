"""Clipping and torch's AdamW in one pass over memory, on the state that torch's optimizer keeps.

The reference is `clip_grads_with_norm_`, a product of the weights with their factors, and `optimizer.step()`. The
optimizer stays torch's own: its state is updated in place, so that checkpoints do not change.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from braidlm.kernels.optimizers.gradient_norm import chunks_of, clip_factor
from braidlm.kernels.optimizers.tables import AddressTable, factors_of
from braidlm.kernels.optional_triton import tl, triton

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
    weights = tl.load(entry).to(tl.pointer_type(tl.float32))
    gradients = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    exp_avgs = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    exp_avg_sqs = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        weights, gradients = tl.multiple_of(weights, 16), tl.multiple_of(gradients, 16)
        exp_avgs, exp_avg_sqs = tl.multiple_of(exp_avgs, 16), tl.multiple_of(exp_avg_sqs, 16)
    lr = tl.load(tl.load(entry + 4).to(tl.pointer_type(tl.float32)))
    size = tl.load(entry + 7)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    mask = offsets < size
    step = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32)))
    correction1 = 1.0 - tl.exp(step * tl.log(BETA1))
    correction2 = tl.sqrt(1.0 - tl.exp(step * tl.log(BETA2)))
    gradient = tl.load(gradients + offsets, mask=mask, other=0.0)
    if CLIPS:
        gradient *= clip_factor(norm, clip)
    weight = tl.load(weights + offsets, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avgs + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sqs + offsets, mask=mask, other=0.0)
    factor = tl.load(tl.load(entry + 6).to(tl.pointer_type(tl.float32)))
    weight *= (1.0 - lr * tl.load(decays + index)) * factor
    exp_avg += (1.0 - BETA1) * (gradient - exp_avg)
    exp_avg_sq = BETA2 * exp_avg_sq + (1.0 - BETA2) * gradient * gradient
    weight -= (lr / correction1) * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
    tl.store(weights + offsets, weight, mask=mask)
    tl.store(exp_avgs + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sqs + offsets, exp_avg_sq, mask=mask)


class FusedAdamW:
    """The steps of one optimizer whose learning rates are tensors on the device."""

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
