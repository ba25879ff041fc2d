"""Weights on several processes: torch's FSDP2 around a single-device model.

A layout says how many copies of the weights there are and over how many processes each is spread; copies alone are
ordinary data parallelism. Every parameter is then a DTensor, of which a process holds its part; a layer is whole only
while it computes. Losses are divided by the count of all processes' labels, so that gradients are sums.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from braidlm.core import console
from braidlm.training.step.expert_parallel import spread_banks
from braidlm.training.step.layout import Layout, alone_with_parameters
from braidlm.training.step.parallel import Rank
from braidlm.training.step.spread import local


def _mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard(
    objective: nn.Module, units: Sequence[nn.Module], layout: Layout, rank: Rank, dtype: torch.dtype, compiled: bool
) -> None:
    """Spread the parameters of an objective; `units`, inner ones first, are gathered one after the other. Weights,
    gradients and their sums stay in their own type; products read weights that were gathered in `dtype`."""
    if not dist.is_initialized():  # this process is alone, and weights are sharded without torchrun
        backend = "cpu:gloo,cuda:nccl" if rank.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    lowered = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=lowered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if layout.experts > 1:  # each expert has copies and shards of its own
        copies, shards = layout.copies, layout.shards // layout.experts
        if layout.shards == 1:
            copies, shards = layout.copies // layout.experts, 1
        _shard_banks(objective, _mesh(rank.device, copy=copies, expert=layout.experts, shard=shards), policy)
    mesh = data_mesh(_mesh(rank.device, copy=layout.copies, shard=layout.shards))
    for unit in alone_with_parameters(units):
        if compiled:
            unit.compile(dynamic=False)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(objective):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # Records of routers are views, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    console.say(f"{rank.world_size} processes: {layout}.")


def _shard_banks(objective: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Give every process its own experts, and spread these over the processes that have the same."""
    shards = mesh["shard"].size()

    def dimension(parameter: nn.Parameter) -> Shard:
        few = parameter.shape[0] < shards and parameter.shape[1] % shards == 0
        return Shard(1 if few else 0)

    for bank in spread_banks(objective, mesh):
        fully_shard(bank, mesh=data_mesh(mesh), mp_policy=policy, shard_placement_fn=dimension)
        for parameter in bank.parameters():
            parameter.bank_mesh = mesh  # type: ignore[attr-defined]


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh over which FSDP2 shards and copies a parameter; one dimension where there is one copy."""
    return mesh["shard"] if mesh["copy"].size() == 1 else mesh["copy", "shard"]


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """The modules in it whose parameters are gathered together."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def synchronize_copies(objective: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass adds up the gradients of all copies, or keeps each copy's own until one does."""
    if isinstance(objective, FSDPModule):
        objective.set_requires_all_reduce(wanted)


@contextlib.contextmanager
def gathered_ends(objective: nn.Module) -> Iterator[None]:
    """Inside of the block what stands around the layers is whole, for passes that do not go through the objective. The
    layers are gathered as they compute; every process must make the same passes."""
    if not isinstance(objective, FSDPModule):
        yield
        return
    objective._get_fsdp_state()._lazy_init()  # before the first step no pass has told which module is outermost
    objective.unshard()
    try:
        yield
    finally:
        for module in sharded_modules(objective):
            module.reshard()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, wherever their parts lie."""
    parts: dict[Any, list[Tensor]] = {}  # by the groups of processes that hold others of them
    for gradient in gradients:
        groups: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            dimensions, mesh = enumerate(gradient.placements), gradient.device_mesh
            groups = tuple(mesh.get_group(index) for index, where in dimensions if isinstance(where, Shard))
        parts.setdefault(groups, []).append(local(gradient))
    if set(parts) <= {()}:
        return nn.utils.get_total_norm(parts.get((), []), foreach=True)
    squares = []
    for groups, tensors in parts.items():
        square = nn.utils.get_total_norm(tensors, foreach=True).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
