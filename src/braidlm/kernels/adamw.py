"""Clipping and torch's AdamW in two passes over memory, on the state that torch's optimizer keeps.

The reference is `clip_grad_norm_` followed by `optimizer.step()`. The optimizer stays torch's own: its state is updated
in place, so that checkpoints do not change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, optim

BLOCK, WARPS = 4096, 8
COLUMNS = 7
"""Of the table: addresses of weight, gradient, both moments, learning rate and step, and the number of elements."""


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
    size = tl.load(entry + 6)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    mask = offsets < size
    step = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32)))
    correction1 = 1.0 - tl.exp(step * tl.log(BETA1))
    correction2 = tl.sqrt(1.0 - tl.exp(step * tl.log(BETA2)))
    gradient = tl.load(gradients + offsets, mask=mask, other=0.0)
    if CLIPS:
        gradient *= tl.minimum(1.0, clip / (tl.load(norm) + 1e-6))
    weight = tl.load(weights + offsets, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avgs + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sqs + offsets, mask=mask, other=0.0)
    weight *= 1.0 - lr * tl.load(decays + index)
    exp_avg += (1.0 - BETA1) * (gradient - exp_avg)
    exp_avg_sq = BETA2 * exp_avg_sq + (1.0 - BETA2) * gradient * gradient
    weight -= (lr / correction1) * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
    tl.store(weights + offsets, weight, mask=mask)
    tl.store(exp_avgs + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sqs + offsets, exp_avg_sq, mask=mask)


@triton.jit
def _squared_sums(table, chunks, sums, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.load(chunks + 2 * tl.program_id(0))
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1)
    if chunk == 0:  # one program counts the parameter's step
        steps = tl.load(table + index * COLUMNS + 5).to(tl.pointer_type(tl.float32))
        tl.store(steps, tl.load(steps) + 1.0)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    gradients = tl.load(table + index * COLUMNS + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(table + index * COLUMNS + 6)
    if ALIGNED:
        gradients, size = tl.multiple_of(gradients, 16), tl.multiple_of(size, 4)
    gradient = tl.load(gradients + offsets, mask=offsets < size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(gradient * gradient))


@triton.jit
def _total_norm(sums, norm, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, mask=offsets < count, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total)))


class ClippedAdamW:
    """The steps of one optimizer whose learning rates are tensors on the device."""

    def __init__(self, optimizer: optim.AdamW):
        self.optimizer = optimizer
        self.parameters = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0][1].device
        self.table = torch.empty(len(self.parameters), COLUMNS, dtype=torch.int64, device=device)
        self.captured: Tensor | None = None
        self.decays = torch.tensor([float(g["weight_decay"]) for g, _ in self.parameters], device=device)
        chunks = [(i, c) for i, (_, p) in enumerate(self.parameters) for c in range(triton.cdiv(p.numel(), BLOCK))]
        self.chunks = torch.tensor(chunks, dtype=torch.int32, device=device)

    @property
    def ready(self) -> bool:
        """Whether torch has made its state (in its own first step) and every parameter has a gradient."""
        state = self.optimizer.state
        return all(p.grad is not None and p.grad.is_contiguous() and len(state[p]) for _, p in self.parameters)

    @torch.no_grad()
    def step(self, clip: float | None) -> Tensor:
        """Update the parameters; return the norm of all gradients, which are scaled down if it is above `clip`."""
        states = [self.optimizer.state[p] for _, p in self.parameters]
        rows = [
            [*(t.data_ptr() for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"], group["lr"], s["step"])), p.numel()]
            for (group, p), s in zip(self.parameters, states, strict=True)
        ]
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = torch.tensor(rows)
        else:
            self.table.copy_(torch.tensor(rows))
        aligned = all(value % 16 == 0 for row in rows for value in row[:4]) and all(row[-1] % 4 == 0 for row in rows)
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        sums = torch.empty(len(self.chunks), dtype=torch.float32, device=self.table.device)
        _squared_sums[(len(sums),)](self.table, self.chunks, sums, aligned, COLUMNS, BLOCK, num_warps=WARPS)
        norm = sums.new_empty(())
        _total_norm[(1,)](sums, norm, len(sums), BLOCK, num_warps=WARPS)
        _adamw[(len(self.chunks),)](
            self.table, self.decays, self.chunks, norm, clip or 0.0, group["eps"],
            beta1, beta2, clip is not None, aligned, COLUMNS, BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return norm

    def write_addresses(self) -> None:
        """After a capture, write the addresses that the captured step reads in each replay."""
        if self.captured is not None:
            self.table.copy_(self.captured)
            self.captured = None
