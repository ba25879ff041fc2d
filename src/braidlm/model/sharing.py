"""Weight sharing: blocks in a row that hold the same parameters.

Each use is a block of its own with its own cache slot, routings and dropout and, unless whole blocks are shared, norms
and routers. Only parameters are shared, and the gradients of all uses add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from .config.ranges import Size
from .errors import BraidError
from .routing.dispatch import Groups
from .routing.router import TopKRouter
from .routing.stacked import StackedLinear, apply_linear, fan_in, linear
from .stages import sharings


@dataclass
class SharingConfig:
    """The options of every kind of sharing."""

    layers: Literal["all", "interior"] = "all"
    """Which layers of the stage share: all of them, or all but the first and the last."""
    lora: Size | None = None
    """Rank of a low-rank addition to every shared matrix that each layer has for itself; by default there is none."""


class Sharing:
    """The base class: subclasses say which part of a block is shared."""

    Config = SharingConfig
    shares_routers = False
    """Whether routers are shared too; their running balance never is."""

    def __init__(self, config: SharingConfig):
        self.config = config

    def part(self, block: Any) -> nn.Module:
        """What is shared of a block."""
        raise NotImplementedError("each kind of sharing shares another part")

    def __call__(self, blocks: Sequence[nn.Module]) -> None:
        """Let these blocks of one shape, which follow one another, share their weights."""
        chosen = blocks if self.config.layers == "all" else blocks[1:-1]
        if len(chosen) < 2:
            which = "layers" if self.config.layers == "all" else "interior layers"
            raise BraidError(f"share: at least 2 {which} are needed, and there are {len(chosen)}")
        first, *others = parts = [self.part(block) for block in chosen]
        if self.config.lora is not None:
            for part in parts:
                _add_low_rank(part, self.config.lora)
        for other in others:
            self._share(other, first)

    def _share(self, own: nn.Module, first: nn.Module) -> None:
        if isinstance(own, LowRank) or (isinstance(own, TopKRouter) and not self.shares_routers):
            return
        for name, parameter in first.named_parameters(recurse=False):
            # While transformers 4 opens a folder, setting an attribute would make another parameter of it.
            own._parameters[name] = parameter
        for name, child in own.named_children():
            self._share(child, first.get_submodule(name))


@sharings.register("feeds")
class SharedFeeds(Sharing):
    """One feed-forward part for all layers (MobiLlama); norms stay apart, and so do the routers of experts."""

    def part(self, block: Any) -> nn.Module:
        return block.feed  # type: ignore[no-any-return]


@sharings.register("attentions")
class SharedAttentions(Sharing):
    """One attention for all layers; norms stay apart, and so do the routers of experts."""

    def part(self, block: Any) -> nn.Module:
        return block.attention  # type: ignore[no-any-return]


@sharings.register("blocks")
class SharedBlocks(Sharing):
    """One block for all layers, with its norms and the routers of its experts (ALBERT)."""

    shares_routers = True

    def part(self, block: Any) -> nn.Module:
        return block  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """The product of two narrow matrices, which begins at zero: what one layer adds to a matrix that several share."""

    def __init__(self, inputs: int, outputs: int, rank: int, stack: int | None = None):
        super().__init__()
        self.down, self.up = linear(stack, inputs, rank), linear(stack, rank, outputs)
        self.down.fill, self.up.fill = fill_kaiming, fill_zeros  # type: ignore[assignment]

    def forward(self, x: Tensor, groups: Groups | None = None, *columns: slice) -> Tensor:
        inner = apply_linear(self.down, x, groups)
        return self.up(inner, groups, *columns) if columns else apply_linear(self.up, inner, groups)


def fill_kaiming(module: nn.Module, parameter: nn.Parameter) -> None:
    """Fill a matrix as torch initialises a linear layer."""
    bound = 1 / math.sqrt(fan_in(module, parameter))
    nn.init.uniform_(parameter, -bound, bound)


def fill_zeros(module: nn.Module, parameter: nn.Parameter) -> None:
    """Fill a matrix with zeros, so that the addition begins at zero."""
    nn.init.zeros_(parameter)


class LowRankLinear(nn.Linear):
    """A linear layer, whose weight may be shared, with a low-rank addition of its own."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora = LowRank(base.in_features, base.out_features, rank)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.lora(input)


class LowRankStackedLinear(StackedLinear):
    """A stack of linear layers, whose weights may be shared; each member has a low-rank addition of its own."""

    def __init__(self, base: StackedLinear, rank: int):
        _, inputs, outputs = base.weight.shape
        super().__init__(base.stack, inputs, outputs, base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.active_share, self.product_share = base.active_share, base.product_share
        self.lora = LowRank(inputs, outputs, rank, base.stack)
        for factor in (self.lora.down, self.lora.up):
            factor.active_share, factor.product_share = base.active_share, base.product_share  # type: ignore[assignment]
        if base.product_share != base.active_share:
            # Queries of some tokens and keys of all are two calls, each of which reads `down`.
            self.lora.down.product_share = 1 + base.active_share  # type: ignore[assignment]

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        return super().forward(x, groups, columns) + self.lora(x, groups, columns)


def _add_low_rank(part: nn.Module, rank: int) -> None:
    """Give every matrix of a part, but for those of routers, a low-rank addition."""
    for name, child in list(part.named_children()):
        if type(child) is nn.Linear:
            setattr(part, name, LowRankLinear(child, rank))
        elif type(child) is StackedLinear:
            setattr(part, name, LowRankStackedLinear(child, rank))
        else:
            _add_low_rank(child, rank)
