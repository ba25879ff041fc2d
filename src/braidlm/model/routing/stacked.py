"""Stacks: modules of one shape (the members) computed as one, their parameters stacked along a first dimension.

Inside a stack the stream is [member, batch, time, width], or [1, batch, time, width] if all members read the same one.
If each member is run on some tokens only, it is rows [row, width] sorted by member, with their `Groups`.
"""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .dispatch import Groups, grouped_product

Layer = TypeVar("Layer", bound=nn.Module)


def with_trained_rows(parameter: Any, rows: slice | None) -> Any:
    """A parameter, if there is one, of which training changes only some rows; the others are detached."""
    if rows is None or parameter is None:
        return parameter
    return torch.cat((parameter[: rows.start].detach(), parameter[rows], parameter[rows.stop :].detach()))


class PartlyTrained:
    """A linear layer with rows for several members, of which some may be frozen."""

    weight: Tensor
    bias: Any
    trained_rows: slice | None = None  # the rows that training changes, where others are frozen

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, detached where they are frozen."""
        return with_trained_rows(self.weight, self.trained_rows), with_trained_rows(self.bias, self.trained_rows)


class StackedLinear(PartlyTrained, nn.Module):
    """A stack of linear layers; weight [member, inputs, outputs]."""

    active_share = 1.0
    """The share of the parameters that is active for a token; less than 1 if a router chooses among the members."""
    product_share = 1.0  # the share of the products that is computed for a token

    def __init__(self, stack: int, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.stack = stack
        self.weight = nn.Parameter(torch.empty(stack, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(stack, outputs)) if bias else None

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        """Compute the outputs in `columns`, by default all."""
        weight, bias = self.rows()
        weight, bias = weight[:, :, columns], None if bias is None else bias[:, columns]
        if groups is not None:
            return self.grouped(x, weight, bias, groups)
        rows = x.flatten(1, -2).expand(self.stack, -1, -1)
        outputs = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias[:, None], rows, weight)
        return outputs.unflatten(1, x.shape[1:-1])

    def grouped(self, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        """Multiply each row by its member's matrix."""
        return grouped_product(rows, weight, bias, groups)

    @property
    def is_transposed(self) -> bool:
        """Tells peft that matrices are [in, out], so that its adapters begin at zero on the side of the outputs. A
        stack of one peft computes as if it were not."""
        return self.stack > 1

    def extra_repr(self) -> str:
        return f"{self.stack} x {self.weight.shape[1]} -> {self.weight.shape[2]}, bias={self.bias is not None}"


def has_hooks(module: nn.Module) -> bool:
    """Whether something looks at the calls of a module, such as what gathers its sharded weights."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_stack(module: nn.Module, members: int) -> bool:
    """Whether all that a module computes is a stack of so many members, and nothing else looks at its calls."""
    return all(
        not has_hooks(part) and not part._buffers and (not part._parameters or getattr(part, "stack", None) == members)
        for part in module.modules()
    )


def one_member(stack: Layer, index: int) -> Layer:
    """One member of a stack, as a stack of one for this pass: its parameters are views of the stack's."""
    one = object.__new__(type(stack))
    parameters = {n: p if p is None else p[index : index + 1] for n, p in stack._parameters.items()}
    modules = {n: m if m is None else one_member(m, index) for n, m in stack._modules.items()}
    one.__dict__ = stack.__dict__ | {"_parameters": parameters, "_modules": modules}
    if getattr(stack, "stack", None) is not None:
        one.stack = 1  # type: ignore[assignment]
    return one


def apply_linear(layer: nn.Module, x: Tensor, groups: Groups | None) -> Tensor:
    """Call a linear layer, or a stack of them on rows sorted into groups."""
    return layer(x) if groups is None else layer(x, groups)


def linear(stack: int | None, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    """One linear layer, or a stack of them."""
    return nn.Linear(inputs, outputs, bias=bias) if stack is None else StackedLinear(stack, inputs, outputs, bias)


def without_residual(layer: Layer) -> Layer:
    """Mark a linear layer that has no residual around it: its initialisation keeps the scale of the stream."""
    layer.no_residual = True  # type: ignore[assignment]
    return layer


def vector(stack: int | None, size: int) -> nn.Parameter:
    """A learned vector, or a stack of them."""
    return nn.Parameter(torch.empty(size) if stack is None else torch.empty(stack, size))


def expand_vector(parameter: Tensor, x: Tensor, groups: Groups | None = None) -> Tensor:
    """A learned vector, or a stack of them, in a shape that broadcasts with `x`."""
    if groups is not None:
        return groups.repeat(parameter, x)
    return parameter if parameter.ndim == 1 else parameter.unflatten(0, (-1,) + (1,) * (x.ndim - 2))


def is_vector(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a module's own parameter is a vector or a stack of vectors: a bias, a norm's scale, a Swish beta."""
    return parameter.ndim - (getattr(module, "stack", None) is not None) < 2


def fan_in(module: nn.Module, parameter: Tensor) -> int:
    """The number of inputs of a matrix."""
    return parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]  # banks are [member, in, out]


def fill_like_torch(module: nn.Module, parameter: nn.Parameter) -> None:
    """Fill a matrix as torch initialises a linear layer."""
    bound = 1 / math.sqrt(fan_in(module, parameter))
    nn.init.uniform_(parameter, -bound, bound)


def fill_zeros(module: nn.Module, parameter: nn.Parameter) -> None:
    """Fill a parameter with zeros, so that what it adds begins at zero."""
    nn.init.zeros_(parameter)


def stack_kwargs(stack: int | None) -> dict[str, int]:
    """The keyword argument for a stack; parts that cannot be stacked have no such parameter."""
    return {} if stack is None else {"stack": stack}
