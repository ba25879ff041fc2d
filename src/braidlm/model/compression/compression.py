"""Compression: which matrices of a model are stored in a smaller form, by the addresses of their layers.

The parts of a model are built as ever; then each layer that the configuration names is replaced by one that computes
the same from a smaller form, so that no part needs to know. A later form finds what an earlier one made.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import Choice, Registry
from ..errors import BraidError
from ..routing.dispatch import Groups
from ..routing.stacked import StackedLinear, linear, without_residual

compressions = Registry("compression", third_party=True)

HEAD = "head"
"""The address of the head, which not every model with a configuration has."""
KEPT = ("active_share", "product_share", "no_residual")
"""What a part has set on its layers, and what holds for any form of them."""


class Compression:
    """The base class: one form of matrices, and the layers that have it."""

    trainable: ClassVar[bool] = True
    """Whether training can change matrices of this form."""
    serves_heads: ClassVar[bool] = False
    """Whether heads can have this form."""

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
        return (
            FactorisedLinear(layer, self.config.ranks[pattern]) if type(layer) in (nn.Linear, StackedLinear) else None
        )


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
            share = layer.active_share
            for half, products in ((self.down, _calls(layer)), (self.up, layer.product_share)):
                half.active_share, half.product_share = share, products  # type: ignore[assignment]

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


def _calls(layer: StackedLinear) -> float:
    """The share of tokens that a member reads, twice if some of its columns are computed for all tokens."""
    return layer.active_share + (0.0 if layer.product_share == layer.active_share else 1.0)
