"""Muon for the matrices between embedding and head, AdamW for all else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn, optim

from braidlm.kernels.optimizers.muon import BatchedMuon
from braidlm.model.config.ranges import Positive, Range, Rate
from braidlm.training.step.optimizers.contract import Optimizer, OptimizerConfig, make_adamw, make_groups, optimizers


@dataclass
class MuonConfig(OptimizerConfig):
    """The options of Muon, and those of AdamW for all that is no matrix of a block."""

    momentum: Rate = 0.95
    """The decay rate of Muon's average of the gradient."""
    nesterov: bool = True
    """Whether Muon's steps look ahead: the gradient and its average instead of the average alone."""
    ns_steps: Annotated[int, Range(at_least=1, at_most=99)] = 5
    """Newton-Schulz iterations, each of three products, that make a step's matrix nearly orthogonal."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """A matrix's factor of the learning rate, as torch.optim.Muon names them. match_rms_adamw: 0.2 sqrt(max(inputs,
    outputs)), which makes steps as large as AdamW's, so that both have one rate and decay; original:
    sqrt(max(1, outputs / inputs)), which needs a rate of about 0.02 and an `adamw_lr` of its own."""
    adamw_lr: Positive | None = None
    """The maximum learning rate of what AdamW trains; by default `lr`. It follows the same schedule."""


@optimizers.register("muon")
class Muon(Optimizer):
    """Muon for each matrix of blocks, experts and projections; AdamW for embedding, head, routers, norms and biases.

    A parameter is one matrix (so queries, keys and values are, where one product makes them), and each member of a
    bank is one.
    """

    Config = MuonConfig

    def make(
        self, config: MuonConfig, model: nn.Module, matrices: Sequence[Tensor], capturable: bool
    ) -> list[optim.Optimizer]:
        chosen = {p for p in matrices if p.requires_grad and p.ndim in (2, 3)}
        parts: list[optim.Optimizer] = []
        if any(p.requires_grad and p not in chosen for p in model.parameters()):
            scale = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
            parts.append(make_adamw(model, config, capturable, chosen, scale))
        if chosen:
            on_gpu = next(iter(chosen)).is_cuda
            muon = BatchedMuon(
                make_groups(model, config, chosen, config.lr, capturable),
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                adjust_lr_fn=config.adjust_lr_fn,
                dtype=torch.bfloat16 if on_gpu else torch.float32,  # few CPUs multiply in bf16 at all
            )
            parts.append(muon)
        return parts
