"""Modules of one shape computed as one: their parameters stacked along a first dimension, called the stack.

Inside a stack the stream is [member, batch, time, width], or [1, batch, time, width] where all members read the same;
or, where each member serves some tokens only, rows [row, width] sorted by member, with their `Groups`.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from .dispatch import Groups, grouped_product
from .routing import Routing

Layer = TypeVar("Layer", bound=nn.Module)


class StackedLinear(nn.Module):
    """As many linear layers as `stack`; weight [member, inputs, outputs]."""

    active_share = 1.0
    """Of its parameters, how many serve a token; less where a router chooses among the members."""
    product_share = 1.0
    """Of its products, how many are computed for a token."""

    def __init__(self, stack: int, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.stack = stack
        self.weight = nn.Parameter(torch.empty(stack, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(stack, outputs)) if bias else None

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        """Of all outputs, those in `columns`."""
        weight = self.weight[:, :, columns]
        bias = None if self.bias is None else self.bias[:, columns]
        if groups is not None:
            return grouped_product(x, weight, bias, groups)
        rows = x.flatten(1, -2).expand(self.stack, -1, -1)
        made = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias[:, None], rows, weight)
        return made.unflatten(1, x.shape[1:-1])

    def extra_repr(self) -> str:
        return f"{self.stack} x {self.weight.shape[1]} -> {self.weight.shape[2]}, bias={self.bias is not None}"


def apply_linear(layer: nn.Module, x: Tensor, groups: Groups | None) -> Tensor:
    """A layer of one module, or of a stack whose rows are sorted into groups."""
    return layer(x) if groups is None else layer(x, groups)


def linear(stack: int | None, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    """One linear layer, or a stack of them."""
    return nn.Linear(inputs, outputs, bias=bias) if stack is None else StackedLinear(stack, inputs, outputs, bias)


def without_residual(layer: Layer) -> Layer:
    """Mark a linear layer that the stream passes through with nothing beside it: it begins by keeping the scale."""
    layer.no_residual = True  # type: ignore[assignment]
    return layer


def vector(stack: int | None, size: int) -> nn.Parameter:
    """A learned vector, or a stack of them."""
    return nn.Parameter(torch.empty(size) if stack is None else torch.empty(stack, size))


def expand_vector(parameter: Tensor, x: Tensor, groups: Groups | None = None) -> Tensor:
    """A vector, or a stack of them, shaped to meet `x` channel by channel."""
    if groups is not None:
        return groups.repeat(parameter, x)
    return parameter if parameter.ndim == 1 else parameter.unflatten(0, (-1,) + (1,) * (x.ndim - 2))


def is_vector(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a module's own parameter is a vector or a stack of vectors: a bias, a norm's scale, a steepness."""
    return parameter.ndim - (getattr(module, "stack", None) is not None) < 2


def fan_in(module: nn.Module, parameter: Tensor) -> int:
    """How many inputs a matrix sums over."""
    return parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]  # banks are [member, in, out]


def stack_kwargs(stack: int | None) -> dict[str, int]:
    """The constructor's argument for a stack; parts that cannot be stacked have no such parameter."""
    return {} if stack is None else {"stack": stack}


def weighted_sum(outputs_EBTW: Tensor, routing: Routing) -> Tensor:
    """The outputs of all members of a stack for every token, weighted by the routing: 0 for those not chosen."""
    return torch.einsum("ebtw,bte->btw", outputs_EBTW, routing.weights_BTN.to(outputs_EBTW.dtype))
