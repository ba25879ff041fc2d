"""Tensors that may lie on several processes, read where they lie.

Torch's DTensor, of which a process holds a part, takes over a second to import: it is where there is one.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def has_parts(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def is_spread(model: nn.Module) -> bool:
    """Whether the parameters of a model lie on several processes."""
    return any(has_parts(parameter) for parameter in model.parameters())


def local(tensor: Any) -> Any:
    """This process's part of a tensor, or all of one that is not spread."""
    return tensor.to_local() if has_parts(tensor) else tensor


def whole_view(tensor: Any, parameter: Tensor) -> Tensor:
    """A parameter, or a tensor that lies as it does, as a part of what is whole with all processes. FSDP2 knows of a
    bank that processes share only the experts that they have; other tensors are so already."""
    mesh: Any = getattr(parameter, "bank_mesh", None)
    if mesh is None or not has_parts(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = torch.Size((tensor.shape[0] * mesh["expert"].size(), *tensor.shape[1:]))
    where = (Replicate(), Shard(0), tensor.placements[-1])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor.to_local(), mesh, where, run_check=False, shape=shape, stride=stride)


def lying_as(parameter: Any, whole: Tensor) -> Tensor:
    """The values of a whole tensor, of which this process holds as much as of a parameter."""
    whole = whole.to(parameter.device)
    if not has_parts(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gathered(held: Tensor, parameter: Any) -> Tensor:
    """The whole of what lies as a parameter that is spread, of which this process holds a part."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


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
            if has_parts(parameter.data):
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
