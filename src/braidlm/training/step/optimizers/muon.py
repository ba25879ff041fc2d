"""Muon for the matrices between embedding and head, AdamW for all else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from braidlm.kernels.optimizers.muon import BatchedMuon
from braidlm.model.config.ranges import Positive, Range, Rate
from braidlm.training.step.optimizers.contract import Optimizer, OptimizerConfig, make_adamw, make_groups, optimizers
from braidlm.training.step.spread import gathered, local, lying_as


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


class SpreadMuon(BatchedMuon):
    """Muon of matrices whose parts several processes hold: each gathers them, makes its share of the products, and
    takes its part of every step."""

    @property
    def group(self) -> Any:
        """The processes that share the products; all matrices are theirs."""
        mesh = self.param_groups[0]["params"][0].device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def held(self, tensor: Any) -> Any:
        return local(tensor)

    def whole(self, held: Tensor, parameter: Tensor) -> Tensor:
        return gathered(held, parameter)

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        return local(lying_as(parameter, whole))  # type: ignore[no-any-return]

    def orthogonalize(self, matrices: Tensor, ns_steps: int) -> Tensor:
        processes, index = dist.get_world_size(self.group), dist.get_rank(self.group)
        share = -(-len(matrices) // processes)
        own = matrices[index * share : (index + 1) * share]
        padding = own.new_zeros(share - len(own), *own.shape[1:])
        made = super().orthogonalize(torch.cat((own, padding)), ns_steps)
        together = [torch.empty_like(made, memory_format=torch.contiguous_format) for _ in range(processes)]
        dist.all_gather(together, made.contiguous(), group=self.group)
        return torch.cat(together)[: len(matrices)]


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
            by_mesh: dict[Any, set[Tensor]] = {}  # by the processes that hold their parts, in one order everywhere
            for parameter in (p for p in matrices if p in chosen):
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), set()).add(parameter)
            for mesh, members in by_mesh.items():
                kind = BatchedMuon if mesh is None else SpreadMuon
                muon = kind(
                    make_groups(model, config, members, config.lr, capturable),
                    momentum=config.momentum,
                    nesterov=config.nesterov,
                    ns_steps=config.ns_steps,
                    adjust_lr_fn=config.adjust_lr_fn,
                    dtype=torch.bfloat16 if on_gpu else torch.float32,  # few CPUs multiply in bf16 at all
                )
                parts.append(muon)
        return parts
