"""Faster modules in the place of a model's own, for passes that loop over no lowerings: those of a CPU, of torch's
compiler and of other libraries' models.

A form is a subclass that computes the same function sooner. It takes over the state of the module that it replaces, so
that nothing changes in what is saved, and it is chosen by exact class.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Form = TypeVar("Form", bound=type[nn.Module])
FORMS: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {}
"""By the type of the device and the exact class of a part."""
_REPLACED: dict[type[nn.Module], type[nn.Module]] = {}


def replaces(*kinds: type[nn.Module], on: tuple[str, ...]) -> Callable[[Form], Form]:
    """Decorator of a form that names the classes which it replaces, on which devices."""

    def add(form: Form) -> Form:
        FORMS.update({(device, kind): form for device in on for kind in kinds})
        _REPLACED[form] = kinds[0]
        return form

    return add


def kind_of(part: nn.Module) -> type[nn.Module]:
    """The exact class of a part, or of the part whose place it took."""
    return _REPLACED.get(type(part), type(part))


def is_eager_cpu(x: Tensor) -> bool:
    """Whether `x` is in a pass on a CPU that torch runs operation by operation."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_eager_cpu_training(x: Tensor) -> bool:
    """Whether `x` is in an eager pass on a CPU that will be differentiated."""
    return is_eager_cpu(x) and torch.is_grad_enabled()
