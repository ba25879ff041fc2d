"""Weights on several processes: torch's FSDP2 around a single-device model, and what reads weights where they lie.

A layout says how many copies of the weights there are and over how many processes each is spread; copies alone are
ordinary data parallelism. Every parameter is then a DTensor, of which a process holds its part; a layer is whole only
while it computes. Losses are divided by the count of all processes' labels, so that gradients are sums.
"""

import contextlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from braidlm.core import console
from braidlm.core.devices import free_memory, training_state_bytes, weights_bytes
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count
from braidlm.training.step.expert_parallel import spread_banks
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


def _mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


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


def is_spread(model: nn.Module) -> bool:
    """Whether the parameters of a model lie on several processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local(tensor: Any) -> Any:
    """This process's part of a tensor, or all of one that is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def whole_view(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A parameter, or a tensor that lies as it does, as a part of what is whole with all processes. FSDP2 knows of a
    bank that processes share only the experts that they have; other tensors are so already."""
    mesh: DeviceMesh | None = getattr(parameter, "bank_mesh", None)
    if mesh is None or not isinstance(tensor, DTensor):
        return tensor
    shape = torch.Size((tensor.shape[0] * mesh["expert"].size(), *tensor.shape[1:]))
    where = (Replicate(), Shard(0), tensor.placements[-1])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor.to_local(), mesh, where, run_check=False, shape=shape, stride=stride)


def lying_as(parameter: Tensor, whole: Tensor) -> Tensor:
    """The values of a whole tensor, of which this process holds as much as of a parameter."""
    whole = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def put(target: Tensor, whole: Tensor) -> None:
    """Take the values of a whole tensor, of which this process may hold a part."""
    local(target).copy_(local(lying_as(target, whole)))


@contextlib.contextmanager
def whole_parameters(model: nn.Module, keep: bool) -> Iterator[None]:
    """Inside of the block the parameters of a model are whole and on the CPU, for code that knows nothing of processes;
    those that do not `keep` them have empty ones. What the block changes is taken over behind it."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[Tensor, nn.Parameter] = {}
    hooks = {module: module._load_state_dict_post_hooks for module in model.modules()}
    for module in hooks:
        module._load_state_dict_post_hooks = OrderedDict()  # FSDP2 would look for parts in what is loaded
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter.data, DTensor):
                if parameter not in made:
                    whole = whole_view(parameter.data, parameter).full_tensor()  # type: ignore[attr-defined]
                    held = whole.cpu() if keep else torch.empty_like(whole, device="meta")
                    made[parameter] = nn.Parameter(held, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
                swapped.append((module, name, parameter))
    try:
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter
        for module, own in hooks.items():
            module._load_state_dict_post_hooks = own
    if keep:
        with torch.no_grad():
            for spread, changed in made.items():
                put(whole_view(spread, spread), changed)
