"""Where the weights of a training lie: how many copies there are, and over how many processes each is spread."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from braidlm.core.devices import free_memory, training_state_bytes, weights_bytes
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count
from braidlm.training.step.parallel import Rank, broadcast

SHARE_OF_MEMORY = 0.5  # what weights, gradients and optimizer state may take of a device; activations need the rest


@dataclass
class ParallelConfig:
    """How the processes that torchrun starts share a model; a word alone is `weights`."""

    weights: Literal["auto", "replicated", "sharded", "hybrid"] = "auto"
    """replicated: every process has all weights; sharded: each has a part of weights, gradients and optimizer state,
    and a layer is gathered while it computes; hybrid: sharded within each machine, with a copy on every machine. auto
    takes the first that fits into half of a device's memory, in the order replicated, hybrid, sharded."""
    experts: Count = 1
    """How many processes share each bank of experts: every one of them has some of the experts, and tokens are sent to
    where their experts are. It divides the number of experts and of processes."""

    @classmethod
    def from_shorthand(cls, weights: Any) -> dict[str, Any]:
        return {"weights": weights}


@dataclass(frozen=True)
class Layout:
    """Where weights lie: copies x shards are all processes, and so many of them share each bank of experts."""

    copies: int
    shards: int
    experts: int = 1

    def __post_init__(self) -> None:
        spread = self.shards if self.shards > 1 else self.copies
        if spread % self.experts:
            lie = f"spread over {spread}" if self.shards > 1 else f"on {spread} processes"
            what = f"training.parallel.experts: {self.experts} processes cannot share a bank where weights are {lie}"
            raise BraidError(what, todo=f"Give a number that divides {spread}.")

    def __str__(self) -> str:
        parts = [f"{self.copies} copies" if self.copies > 1 else "", f"{self.shards} shards" if self.shards > 1 else ""]
        experts = f", experts over {self.experts} processes" if self.experts > 1 else ""
        return (" x ".join(filter(None, parts)) or "1 shard") + experts


def choose_layout(config: ParallelConfig, model: nn.Module, rank: Rank) -> Layout | None:
    """Where the weights of a model (a skeleton will do) are to lie; None for one process that has all of them."""
    world, here = rank.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
    if world == 1 and config.weights in ("auto", "replicated"):
        if config.experts > 1:
            what = f"training.parallel.experts: {config.experts} processes are to share experts, and there is one"
            raise BraidError(what, todo=f"Start them by `torchrun --nproc-per-node {config.experts} -m braidlm train`.")
        return None
    weights = config.weights
    if weights == "auto":
        memory = (free_memory(rank.device) or float("inf")) / here
        if rank.device.type == "cuda":
            memory = torch.cuda.mem_get_info(rank.device)[1]
        weights = fitting(weights_bytes(model) + training_state_bytes(model), memory, here)
    return layout_of(ParallelConfig(broadcast(weights, rank), config.experts), world, here)


def layout_of(config: ParallelConfig, world: int, here: int) -> Layout:
    """The layout of so many processes, of which so many are on each machine; `weights` is not auto any more."""
    copies = {"replicated": world, "sharded": 1, "hybrid": 1 if world % here else world // here}[config.weights]
    return Layout(copies, world // copies, config.experts)


def shards_of(training: Any, model: nn.Module, rank: Rank) -> int:
    """Over how many processes a training spreads each weight of a model (a skeleton will do)."""
    layout = choose_layout(training.parallel, model, rank)
    return 1 if layout is None else layout.shards


def fitting(needed: float, memory: float, here: int) -> Literal["replicated", "sharded", "hybrid"]:
    """The first way in which weights, gradients and optimizer state of so many bytes take half of a device's memory."""
    if needed <= SHARE_OF_MEMORY * memory:
        return "replicated"
    return "hybrid" if needed / here <= SHARE_OF_MEMORY * memory else "sharded"


def alone_with_parameters(units: Iterable[nn.Module]) -> list[nn.Module]:
    """The units that have parameters of their own, and share none with another unit: those go to what is around."""
    chosen: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    units = list(units)
    inside = [set(unit.modules()) for unit in units]
    for unit, modules in zip(units, inside, strict=True):
        own = set(unit.parameters()) - taken
        apart = [one for one, parts in zip(units, inside, strict=True) if one not in modules and unit not in parts]
        if own and own.isdisjoint(p for other in apart for p in other.parameters()):
            chosen.append(unit)
            taken |= own
    return chosen
