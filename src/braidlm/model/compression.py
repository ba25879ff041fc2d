"""Compression: which matrices of a model are stored in a smaller form, by the addresses of their layers.

The parts of a model are built as ever; then each layer that the configuration names is replaced by one that computes
the same from a smaller form, so that no part needs to know. A later form finds what an earlier one made.

Quantised matrices are whole numbers of 8 or 4 bits, and the factors that make weights of them. A product makes weights
of the whole numbers, in the type of the factors, and forgets them; so any device computes it, and the weights take a
quarter of the memory and less. They cannot be trained: whole numbers have no gradient.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config.ranges import Size
from .config.registry import Choice, Registry
from .errors import BraidError
from .heads.ends import Embedding, Head, LinearHead, TokenEmbedding
from .routing.dispatch import Groups
from .routing.stacked import StackedLinear, linear, without_residual

compressions = Registry("compression", third_party=True)

HEAD = "head"  # the address of the head, which not every model with a configuration has
KEPT = ("active_share", "product_share", "no_residual")
"""What a part has set on its layers, and what holds for any form of them."""


class Compression:
    """The base class: one form of matrices, and the layers that have it."""

    trainable: ClassVar[bool] = True  # whether training can change matrices of this form
    serves_heads: ClassVar[bool] = False  # whether heads can have this form

    def __init__(self, config: Any):
        self.config = config

    @property
    def patterns(self) -> Iterable[str]:
        """Addresses of layers, or patterns of them."""
        return self.config.modules  # type: ignore[no-any-return]

    def replacement(self, layer: nn.Module, pattern: str) -> nn.Module | None:
        """The layer in this form, with parameters of its own; None for a module without a matrix to compress."""
        raise NotImplementedError("each form replaces layers by its own")

    def apply(self, model: nn.Module) -> list[str]:
        """Replace the layers of a model that are named; returns their addresses."""
        replaced: list[str] = []
        made: dict[nn.Parameter, nn.Module] = {}
        for address, module in list(model.named_modules()):
            pattern = next((p for p in self.patterns if fnmatchcase(address, p)), None)
            # A router compares scores that are near to each other, and its matrix is small: it stays as it is.
            layer = None if pattern is None or "router" in address.split(".") else self.replacement(module, pattern)
            if layer is None:
                continue
            for name in KEPT:
                if name in vars(module):
                    setattr(layer, name, vars(module)[name])
            weight: Any = module.weight
            if (first := made.setdefault(weight, layer)) is not layer:
                for name, parameter in first.named_parameters():  # what layers shared they share in the new form
                    set_by_address(layer, name, parameter)
            set_by_address(model, address, layer)
            replaced.append(address)
        return replaced


def set_by_address(root: nn.Module, address: str, value: nn.Module | nn.Parameter) -> None:
    """Let a module or parameter below `root` be another one."""
    parent, _, own = address.rpartition(".")
    if isinstance(value, nn.Parameter):
        # While transformers 4 opens a folder, setting an attribute would make another parameter of it.
        root.get_submodule(parent)._parameters[own] = value
    else:
        setattr(root.get_submodule(parent), own, value)


def compress(model: nn.Module, choices: list[Choice]) -> None:
    """Replace the layers of a model without its head; a pattern that fits no layer is an error."""
    for choice in choices:
        compression = compressions.build(choice)
        found = compression.apply(model) + ([HEAD] if compression.serves_heads else [])
        for pattern in compression.patterns:
            if not any(fnmatchcase(address, pattern) for address in found):
                raise BraidError(f"compression '{choice.kind}': no layer is called '{pattern}'")


def compressed_head(head: nn.Module, choices: list[Choice]) -> nn.Module:
    """The head in the form that the configuration gives it."""
    alone = nn.ModuleDict({HEAD: head})
    for choice in choices:
        compressions.build(choice).apply(alone)
    return alone[HEAD]


def untrainable(choices: list[Choice]) -> list[str]:
    """The kinds among these whose matrices cannot be trained."""
    return [choice.kind for choice in choices if not compressions[choice.kind].trainable]


@compressions.register("low_rank")
class Factorised(Compression):
    """Linear layers, and banks of them, as products of two; they are trained as any others."""

    @dataclass
    class Config:
        ranks: dict[str, Size]
        """By the address of a layer, or a pattern of addresses (`stages.*.feed.*`), the rank of its matrix."""

    @property
    def patterns(self) -> Iterable[str]:
        return self.config.ranks  # type: ignore[no-any-return]

    def replacement(self, layer: nn.Module, pattern: str) -> nn.Module | None:
        linear_layer = type(layer) in (nn.Linear, StackedLinear)
        return FactorisedLinear(layer, self.config.ranks[pattern]) if linear_layer else None


class FactorisedLinear(nn.Module):
    """A linear layer to `rank` channels and another from them, or a stack of such pairs."""

    def __init__(self, layer: Any, rank: int):
        super().__init__()
        self.stack = getattr(layer, "stack", None)
        inputs, outputs = sizes_of(layer)
        if rank > min(inputs, outputs):
            raise BraidError(f"rank {rank} is more than a matrix of {inputs} x {outputs} can have")
        # The scale of the first product is kept, so that the second is initialised as the whole matrix would be.
        self.down = without_residual(linear(self.stack, inputs, rank))
        self.up = linear(self.stack, rank, outputs, bias=layer.bias is not None)
        if isinstance(layer, StackedLinear):
            share, product_share = layer.active_share, layer.product_share
            # A member reads its share of the tokens, and once more if some of its columns are computed for all tokens.
            reads = share + (0.0 if product_share == share else 1.0)
            for half, products in ((self.down, reads), (self.up, product_share)):
                half.active_share, half.product_share = share, products  # type: ignore[assignment]

    @property
    def bias(self) -> nn.Parameter | None:
        """What the layer that it stands for adds, for those who ask any linear layer."""
        return self.up.bias  # type: ignore[return-value]

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        """The outputs; the arguments are those of the layer that it stands for."""
        if self.stack is None:
            return self.up(self.down(x))  # type: ignore[no-any-return]
        return self.up(self.down(x, groups), groups, columns)  # type: ignore[no-any-return]


def sizes_of(layer: Any) -> tuple[int, int]:
    """The inputs and outputs of a linear layer or of each member of a stack."""
    if isinstance(layer, StackedLinear):
        return layer.weight.shape[1], layer.weight.shape[2]
    return layer.in_features, layer.out_features


RANDOM = 0.02 / 74
"""The factor of random codes, whose standard deviation is 74, in a model whose weights are not loaded yet."""
FEW_ROWS = 4
"""Up to so many rows, torch's own product with codes of 8 bits is faster on a CPU than making weights of them."""


class QuantisedMatrix(nn.Module):
    """A matrix [..., outputs, inputs] of codes of 8 bits and a factor for each output, in place of `nn.Linear`."""

    keeps_values = True  # tells the initialisation that the parameters have their values
    active_share = 1.0
    product_share = 1.0
    weight: Tensor

    def __init__(self, shape: tuple[int, ...], bias: nn.Parameter | None = None, dynamic: bool = False):
        nn.Module.__init__(self)
        self.represents, self.dynamic = math.prod(shape), dynamic
        self.make_codes(shape)
        self.bias = bias

    def make_codes(self, shape: tuple[int, ...]) -> None:
        """Give the matrix random codes until its own are loaded."""
        self.weight = fixed(torch.randint(-127, 128, shape, dtype=torch.int8))
        self.scale = fixed(torch.full((*shape[:-1], 1), RANDOM))

    def dense(self) -> Tensor:
        """The weights [..., outputs, inputs]."""
        return self.weight.to(self.scale.dtype).mul_(self.scale)

    def rounded(self, x: Tensor) -> Tensor:
        """The inputs of a product: with `dynamic` each token's are rounded to 8 bits, by a factor of its own."""
        if self.training and torch.is_grad_enabled():
            todo = "Train the model that it was made of, then quantise the result. To predict, call model.eval()."
            raise BraidError("a quantised model cannot be trained: its weights are whole numbers", todo=todo)
        if not self.dynamic:
            return x
        scale = (x.detach().abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
        return (x / scale).round().mul(scale)

    def forward(self, x: Tensor) -> Tensor:
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

    def make_codes(self, shape: tuple[int, ...]) -> None:
        rows = shape[:-1]
        self.weight = fixed(torch.randint(0, 256, (*rows, shape[-1] // 2), dtype=torch.uint8))
        self.scale = fixed(torch.full((*rows, self.groups), RANDOM * 16))
        self.zero = fixed(torch.full((*rows, self.groups), 8, dtype=torch.uint8))

    def dense(self) -> Tensor:
        codes = torch.stack((self.weight & 15, self.weight >> 4), dim=-1).flatten(-2)
        groups = codes.to(self.scale.dtype).unflatten(-1, (self.groups, -1))
        return groups.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(-2)


class QuantisedStack(QuantisedMatrix, StackedLinear):
    """`StackedLinear` with codes of 8 bits, [member, outputs, inputs]."""

    def __init__(self, shape: tuple[int, ...], *args: Any):
        super().__init__(shape, *args)
        self.stack = shape[0]

    def rows(self) -> tuple[Tensor, Tensor | None]:
        return self.dense().transpose(1, 2), self.bias

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        return StackedLinear.forward(self, self.rounded(x), groups, columns)


class FourBitStack(FourBitMatrix, QuantisedStack):
    """`StackedLinear` with codes of 4 bits."""


class QuantisedEmbedding(QuantisedMatrix, Embedding):
    """A vector of codes of 8 bits for each token."""

    def forward(self, ids: Tensor) -> Tensor:
        self.rounded(self.scale)
        return F.embedding(ids, self.weight).to(self.scale.dtype) * F.embedding(ids, self.scale)


class QuantisedHead(QuantisedMatrix, Head):
    """The linear head with codes of 8 bits; it may share them with the embedding."""

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
            form = QuantisedMatrix if kind is nn.Linear else QuantisedStack
            return form(matrix_shape(layer), layer.bias, dynamic)
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
        form = FourBitMatrix if type(layer) is nn.Linear else FourBitStack
        return form(matrix_shape(layer), self.config.group, layer.bias)


def matrix_shape(layer: Any) -> tuple[int, ...]:
    """[outputs, inputs] of a linear layer, [member, outputs, inputs] of a stack."""
    inputs, outputs = sizes_of(layer)
    return (outputs, inputs) if type(layer) is nn.Linear else (layer.stack, outputs, inputs)


def fixed(values: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(values, requires_grad=False)
