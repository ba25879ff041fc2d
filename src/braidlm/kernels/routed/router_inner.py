"""The first layer of a router of two, with its activation: float32 results from half-precision products.

Scores are to be as exact as float32 ones, since near ties decide which experts are chosen. The rows have 8 bits, and
their product with the upper 8 bits of a weight, and with the next 8, is exact before it is added up in float32. So two
half-precision products, computed as one, take the place of a float32 product that is ten times as slow.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.linear import product


class RouterInner(torch.autograd.Function):
    """rows [rows, in], weight [hidden, in], bias [hidden] -> the activation [rows, hidden] in float32.

    Gradients are computed in the type of the rows, as those of all other layers.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        inner = _exact_product(rows, weight) + bias
        ctx.save_for_backward(rows, weight, inner)
        ctx.activation = activation
        return F.gelu(inner) if activation == "gelu" else F.relu(inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inner = ctx.saved_tensors
        if ctx.activation == "gelu":
            inner_gradient = torch.ops.aten.gelu_backward(gradient, inner)
        else:
            inner_gradient = gradient * (inner > 0)
        narrow = inner_gradient.to(rows.dtype)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            narrow @ weight.to(rows.dtype) if needs_rows else None,
            product(narrow.t(), rows, weight.dtype) if needs_weight else None,
            inner_gradient.sum(0) if needs_bias else None,
            None,
        )


def _exact_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight^T in float32."""
    if rows.dtype == weight.dtype:
        return product(rows, weight.t(), torch.float32)
    upper = weight.to(rows.dtype)
    lower = (weight - upper).to(rows.dtype)
    both = product(rows, torch.cat((upper, lower)).t(), torch.float32)
    return both[:, : len(weight)] + both[:, len(weight) :]


def plain_router_inner(rows: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """The reference, in torch's operations."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    inner = F.linear(rows.to(wide), weight.to(wide), bias.to(wide))
    return F.gelu(inner) if activation == "gelu" else F.relu(inner)
