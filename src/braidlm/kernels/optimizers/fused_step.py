"""Clipping and the steps of all of a model's optimizers, by few passes over memory.

The reference is `clip_grad_norm_`, a product of the weights with their factors, and `step()` of each optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from braidlm.kernels.optimizers.adamw import FusedAdamW
from braidlm.kernels.optimizers.batched_muon import BatchedMuon
from braidlm.kernels.optimizers.gradient_norm import GradientNorm
from braidlm.kernels.optimizers.muon import FusedMuon
from braidlm.kernels.side_stream import SideStream, on_side

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
