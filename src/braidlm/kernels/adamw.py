"""Clipping and torch's AdamW in two passes over memory, on the state that torch's optimizer keeps.

The reference is `clip_grad_norm_` and then `optimizer.step()`. The optimizer stays torch's own: its state is read
and pending where it is, so checkpoints know of nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, optim

BLOCK, WARPS = 4096, 8
COLUMNS = 7
"""Of the table: addresses of weight, gradient, both moments, rate and count of steps, and config many numbers it has."""


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, decays, chunks, norm, clip, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, CLIPS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.load(chunks + 2 * tl.program_id(0))
    offsets = tl.load(chunks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    entry = table + which * COLUMNS
    weights = tl.load(entry).to(tl.pointer_type(tl.float32))
    gradients = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    firsts = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    seconds = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        weights, gradients = tl.multiple_of(weights, 16), tl.multiple_of(gradients, 16)
        firsts, seconds = tl.multiple_of(firsts, 16), tl.multiple_of(seconds, 16)
    rate = tl.load(tl.load(entry + 4).to(tl.pointer_type(tl.float32)))
    size = tl.load(entry + 6)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    inside = offsets < size
    count = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32)))
    first_share = 1.0 - tl.exp(count * tl.log(FIRST))
    second_share = tl.sqrt(1.0 - tl.exp(count * tl.log(SECOND)))
    gradient = tl.load(gradients + offsets, mask=inside, other=0.0)
    if CLIPS:
        gradient *= tl.minimum(1.0, clip / (tl.load(norm) + 1e-6))
    weight = tl.load(weights + offsets, mask=inside, other=0.0)
    first = tl.load(firsts + offsets, mask=inside, other=0.0)
    second = tl.load(seconds + offsets, mask=inside, other=0.0)
    weight *= 1.0 - rate * tl.load(decays + which)
    first += (1.0 - FIRST) * (gradient - first)
    second = SECOND * second + (1.0 - SECOND) * gradient * gradient
    weight -= (rate / first_share) * first / (tl.sqrt(second) / second_share + eps)
    tl.store(weights + offsets, weight, mask=inside)
    tl.store(firsts + offsets, first, mask=inside)
    tl.store(seconds + offsets, second, mask=inside)


@triton.jit
def _squares(table, chunks, sums, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.load(chunks + 2 * tl.program_id(0))
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1)
    if chunk == 0:  # the one program that counts the parameter's step
        steps = tl.load(table + which * COLUMNS + 5).to(tl.pointer_type(tl.float32))
        tl.store(steps, tl.load(steps) + 1.0)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    gradients = tl.load(table + which * COLUMNS + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(table + which * COLUMNS + 6)
    if ALIGNED:
        gradients, size = tl.multiple_of(gradients, 16), tl.multiple_of(size, 4)
    gradient = tl.load(gradients + offsets, mask=offsets < size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(gradient * gradient))


@triton.jit
def _length(sums, norm, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, mask=offsets < count, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total)))


class ClippedAdamW:
    """Steps for one optimizer, whose rates are tensors on the device."""

    def __init__(self, optimizer: optim.AdamW):
        self.optimizer = optimizer
        self.group_of = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        device = self.group_of[0][1].device
        self.table = torch.empty(len(self.group_of), COLUMNS, dtype=torch.int64, device=device)
        self.captured: Tensor | None = None
        self.decays = torch.tensor([float(g["weight_decay"]) for g, _ in self.group_of], device=device)
        chunks = [(i, c) for i, (_, p) in enumerate(self.group_of) for c in range(triton.cdiv(p.numel(), BLOCK))]
        self.chunks = torch.tensor(chunks, dtype=torch.int32, device=device)

    @property
    def ready(self) -> bool:
        """Whether torch has made its state (in its own first step) and every parameter has a gradient."""
        state = self.optimizer.state
        return all(p.grad is not None and p.grad.is_contiguous() and len(state[p]) for _, p in self.group_of)

    @torch.no_grad()
    def step(self, clip: float | None) -> Tensor:
        """Gives the length of all gradients together; if it is above `clip` they are shortened to that."""
        states = [self.optimizer.state[p] for _, p in self.group_of]
        rows = [
            [*(t.data_ptr() for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"], group["lr"], s["step"])), p.numel()]
            for (group, p), s in zip(self.group_of, states, strict=True)
        ]
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = torch.tensor(rows)
        else:
            self.table.copy_(torch.tensor(rows))
        aligned = all(value % 16 == 0 for row in rows for value in row[:4]) and all(row[-1] % 4 == 0 for row in rows)
        group = self.optimizer.param_groups[0]
        first, second = group["betas"]
        sums = torch.empty(len(self.chunks), dtype=torch.float32, device=self.table.device)
        _squares[(len(sums),)](self.table, self.chunks, sums, aligned, COLUMNS, BLOCK, num_warps=WARPS)
        norm = sums.new_empty(())
        _length[(1,)](sums, norm, len(sums), BLOCK, num_warps=WARPS)
        _adamw[(len(self.chunks),)](
            self.table, self.decays, self.chunks, norm, clip or 0.0, group["eps"],
            first, second, clip is not None, aligned, COLUMNS, BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return norm

    def settle(self) -> None:
        """After a capture: write the addresses down that the captured step will read in each replay."""
        if self.captured is not None:
            self.table.copy_(self.captured)
            self.captured = None
