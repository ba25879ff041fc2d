"""Low rank: a matrix as the product of two narrow ones, with fewer parameters and fewer FLOPs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..config.ranges import Size
from ..errors import BraidError
from ..routing.dispatch import Groups
from ..routing.stacked import StackedLinear, linear, without_residual
from .compression import Compression, compressions


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
        """As the layer that it stands for is called."""
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
