"""Quantised matrices: whole numbers of 8 or 4 bits, and the factors that make weights of them.

A product makes weights of the whole numbers, in the type of the factors, and forgets them; so any device computes it,
and the weights take a quarter of the memory and less. Nothing here can be trained: whole numbers have no gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Size
from ..errors import BraidError
from ..heads.ends import Embedding, Head, LinearHead, TokenEmbedding
from ..routing.dispatch import Groups
from ..routing.stacked import StackedLinear
from .compression import Compression, compressions, sizes_of

RANDOM = 0.02 / 74
"""The factor of random codes, whose standard deviation is 74, in a model whose weights are not loaded yet."""


FEW_ROWS = 4
"""Up to so many rows, torch's own product with codes of 8 bits is faster on a CPU than making weights of them."""


class QuantisedMatrix(nn.Module):
    """A matrix [..., outputs, inputs] of codes of 8 bits, and a factor for each output."""

    keeps_values = True
    """Tells the initialisation that the parameters have their values."""
    active_share = 1.0
    product_share = 1.0
    weight: Tensor

    def __init__(self, shape: tuple[int, ...], bias: nn.Parameter | None = None, dynamic: bool = False):
        nn.Module.__init__(self)
        self.represents, self.dynamic = math.prod(shape), dynamic
        self._make_codes(shape)
        self.bias = bias

    def _make_codes(self, shape: tuple[int, ...]) -> None:
        self.weight = fixed(torch.randint(-127, 128, shape, dtype=torch.int8))
        self.scale = fixed(torch.full((*shape[:-1], 1), RANDOM))

    def dense(self) -> Tensor:
        """The weights [..., outputs, inputs]."""
        return self.weight.to(self.scale.dtype).mul_(self.scale)

    def rounded(self, x: Tensor) -> Tensor:
        """The inputs of a product: with `dynamic` each token's are rounded to 8 bits, by a factor of its own."""
        if self.training and torch.is_grad_enabled():
            raise BraidError(
                "a quantised model cannot be trained: its weights are whole numbers",
                todo="Train the model that it was made of, then quantise the result. To predict, call model.eval().",
            )
        if not self.dynamic:
            return x
        scale = (x.detach().abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
        return (x / scale).round().mul(scale)

    def product(self, x: Tensor) -> Tensor:
        """The outputs of one matrix for inputs [..., inputs], in which a few rows do not pay for all weights."""
        x = self.rounded(x)
        rows = x.numel() // x.shape[-1]
        plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
        if x.is_cpu and plain and 0 < rows <= FEW_ROWS and (self.weight.dtype, x.dtype) == (torch.int8, torch.float32):
            outputs = torch._weight_int8pack_mm(x.reshape(rows, -1), self.weight, self.scale[:, 0])
            outputs = outputs.view(*x.shape[:-1], -1)
            return outputs if self.bias is None else outputs + self.bias
        return F.linear(x, self.dense(), self.bias)


class FourBitMatrix(QuantisedMatrix):
    """A matrix of codes of 4 bits, two in a byte; each group of an output's inputs has a factor and a zero."""

    def __init__(self, shape: tuple[int, ...], group: int, bias: nn.Parameter | None = None):
        if shape[-1] % group or group % 2:
            raise BraidError(f"groups of {group} do not divide {shape[-1]} inputs into pairs")
        self.groups = shape[-1] // group
        super().__init__(shape, bias)

    def _make_codes(self, shape: tuple[int, ...]) -> None:
        rows = shape[:-1]
        self.weight = fixed(torch.randint(0, 256, (*rows, shape[-1] // 2), dtype=torch.uint8))
        self.scale = fixed(torch.full((*rows, self.groups), RANDOM * 16))
        self.zero = fixed(torch.full((*rows, self.groups), 8, dtype=torch.uint8))

    def dense(self) -> Tensor:
        codes = torch.stack((self.weight & 15, self.weight >> 4), dim=-1).flatten(-2)
        groups = codes.to(self.scale.dtype).unflatten(-1, (self.groups, -1))
        return groups.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(-2)


class QuantisedLinear(QuantisedMatrix):
    """`nn.Linear` with codes of 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class QuantisedStack(QuantisedMatrix, StackedLinear):
    """`StackedLinear` with codes of 8 bits, [member, outputs, inputs]."""

    def __init__(self, shape: tuple[int, ...], *args: Any):
        super().__init__(shape, *args)
        self.stack = shape[0]

    def rows(self) -> tuple[Tensor, Tensor | None]:
        return self.dense().transpose(1, 2), self.bias

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        return StackedLinear.forward(self, self.rounded(x), groups, columns)


class FourBitLinear(FourBitMatrix, QuantisedLinear):
    """`nn.Linear` with codes of 4 bits."""


class FourBitStack(FourBitMatrix, QuantisedStack):
    """`StackedLinear` with codes of 4 bits."""


class QuantisedEmbedding(QuantisedMatrix, Embedding):
    """A vector of codes of 8 bits for each token."""

    def forward(self, ids: Tensor) -> Tensor:
        self.rounded(self.scale)
        return F.embedding(ids, self.weight).to(self.scale.dtype) * F.embedding(ids, self.scale)


class QuantisedHead(QuantisedMatrix, Head):
    """The linear head with codes of 8 bits; it may share them with the embedding."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden)

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        shared = isinstance(embedding, QuantisedEmbedding)
        return {"weight": "weight", "scale": "scale"} if shared else {}


@compressions.register("int8")
class Int8(Compression):
    """Whole numbers of 8 bits, with a factor for each output: linear layers, banks of them, embedding and head."""

    trainable = False
    serves_heads = True

    @dataclass
    class Config:
        modules: list[str]
        """Addresses of layers, or patterns of them: `stages.*`, `embedding`, `head`."""
        dynamic: bool = False
        """Whether the inputs of each product are rounded to 8 bits too, as devices with integer products need it."""

    def replacement(self, layer: Any, pattern: str) -> nn.Module | None:
        kind, dynamic = type(layer), self.config.dynamic
        if kind is TokenEmbedding:
            return QuantisedEmbedding(layer.weight.shape)
        if kind is LinearHead:
            return QuantisedHead(layer.weight.shape, layer.bias, dynamic)
        if kind in (nn.Linear, StackedLinear):
            return _class(layer, QuantisedLinear, QuantisedStack)(matrix_shape(layer), layer.bias, dynamic)
        return None


@compressions.register("int4")
class Int4(Compression):
    """Whole numbers of 4 bits, with a factor and a zero for each group of inputs: linear layers and banks of them."""

    trainable = False

    @dataclass
    class Config:
        modules: list[str]
        """Addresses of layers, or patterns of them: `stages.*`."""
        group: Size = 32
        """How many inputs of an output have one factor."""

    def replacement(self, layer: Any, pattern: str) -> nn.Module | None:
        if type(layer) not in (nn.Linear, StackedLinear):
            return None
        return _class(layer, FourBitLinear, FourBitStack)(matrix_shape(layer), self.config.group, layer.bias)


def matrix_shape(layer: Any) -> tuple[int, ...]:
    """[outputs, inputs] of a linear layer, [member, outputs, inputs] of a stack."""
    inputs, outputs = sizes_of(layer)
    return (outputs, inputs) if type(layer) is nn.Linear else (layer.stack, outputs, inputs)


def fixed(values: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(values, requires_grad=False)


def _class(layer: nn.Module, one: type, stack: type) -> Any:
    return one if type(layer) is nn.Linear else stack
