"""The contract of a lowering: all that the pass, the planner and `braid show` know of one class of parts.

The lowerings of related parts are one file of this folder, or of another package, which names it as an entry point of
the group `braidlm.lowerings`. A kernel opts in, by exact class and by option: a part that has any other option set is
refused and runs its plain forward.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from braidlm.kernels.context import LayerOutput, PassContext, PendingAdd, Stream, Sublayer
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.ops.fold import Bank
from braidlm.kernels.replacing import kind_of
from braidlm.model.config.registry import Choice
from braidlm.model.dropout import Dropout
from braidlm.model.errors import BraidError
from braidlm.model.routing.router import ScoreLinear
from braidlm.model.routing.stacked import StackedLinear

ENTRY_POINTS = "braidlm.lowerings"
NO_OPTIONS = (nn.Linear, ScoreLinear, StackedLinear, nn.ModuleList, nn.ModuleDict, Dropout)
"""Classes inside a part that have no options of their own; an adapter or a parametrisation replaces them by another."""
DROPS = ("", "feed", "expert_outputs", "experts")
"""The kinds of dropout that kernels know, inside the parts that have them."""


@dataclass(frozen=True)
class SharedSums:
    """A module whose vectors' gradients kernels sum together with those of the modules that have the same key."""

    key: Any
    module: nn.Module
    by_blocks: bool = False
    """Whether the sums of a few blocks in a row are finished at once, and not those of all layers."""


@dataclass(frozen=True)
class SharedStack:
    """Matrices of a part whose gradients are computed together with those of the parts that have the same key."""

    key: Any
    matrices: tuple[Any, ...]
    rows: int
    """The rows that one part writes."""
    make: Callable[[int], list[GradientStack]]
    """From a number of parts to the stack of each matrix."""
    grouped: bool = False
    """Whether the rows are sorted by expert."""
    by_blocks: bool = False
    """Whether the parts of so many blocks in a row are computed together as fill the device, whatever their kinds."""


def dense_stack(kind: Any, linear: Any, rows: int, dtype: torch.dtype, by_blocks: bool = False) -> SharedStack:
    """The slot of a matrix [out, in], or of a bank of matrices [member, in, out] whose products are one."""
    *members, height, width = shape = linear.weight.shape
    inputs, outputs = (height, members[0] * width) if members else (width, height)

    def make(layers: int) -> list[GradientStack]:
        read, gradients = (StackedRows(layers, rows, columns, dtype) for columns in (inputs, outputs))
        return [GradientStack(read, gradients, transposed=bool(members))]

    return SharedStack((kind, shape), (linear,), rows, make, by_blocks=by_blocks)


class Lowering:
    """What the kernels of one class of parts can do, and what they need before a pass."""

    honours: ClassVar[Iterable[str]] = ()
    """The options that the kernels implement; those of a nested configuration with dots."""
    has_seeds: ClassVar[bool] = False
    """Whether the part's own dropout draws its numbers inside kernels."""
    is_one: ClassVar[bool] = True
    """Whether all modules inside the part are served together or not at all."""

    def reject(self, part: Any, body: Any) -> str | None:
        """A reason against the kernels that no option's name tells; `body` is the BraidModel around the part."""
        return None

    def reads(self, part: Any) -> Iterable[Tensor | None]:
        """The parameters that products read in a cast copy, as they are: not those that are folded."""
        return ()

    def folds(self, part: Any) -> dict[nn.Module, Bank]:
        """The banks of matrices that are folded before the pass, by the layers that have them."""
        return {}

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> Iterable[SharedStack]:
        """The gradient slots of the part in a pass over so many rows. A part that has a slot must also submit to it, or
        the others in the stack would wait in vain."""
        return ()

    def sums(self, part: Any, norm: Any) -> Iterable[SharedSums]:
        """The column sums of the part, and, in a block, of the norm before it."""
        return ()


class SublayerLowering(Lowering):
    """An attention or a feed-forward part of a block."""

    routed: ClassVar[bool] = False
    """Whether a router chooses what computes a token."""

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        """The stream with the pending addition, what the part adds to it, and routings; `norm` is before the part."""
        raise NotImplementedError


class LayerLowering(Lowering):
    """A layer of a stage, or a stage that is one layer."""

    only_training: ClassVar[bool] = False
    """Whether a pass in evaluation is the plain forward's."""

    def sublayers(self, layer: Any) -> list[tuple[str, Any, Any]]:
        """Kind, norm and part of each sublayer, where these are served or refused one by one."""
        return []

    def inside(self, layer: Any, time: int) -> tuple[Any, int] | None:
        """A layer inside this one, and how many tokens of a text it computes."""
        return None

    def run(self, stream: Stream, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        """The stream after the layer, what the layer leaves for the next one to add, and routings."""
        raise NotImplementedError


LOWERINGS: dict[type[nn.Module], Any] = {}
"""By exact class: a subclass may compute something else."""
MIXINS: dict[type[nn.Module], type[Lowering]] = {}
"""The lowerings of classes that are mixed into the classes of layers: each is mixed into the layer's own lowering."""


def lowers(*kinds: type[nn.Module]) -> Callable[[type[Lowering]], type[Lowering]]:
    """Decorator of a lowering that names the classes which it serves."""

    def add(lowering: type[Lowering]) -> type[Lowering]:
        LOWERINGS.update(dict.fromkeys(kinds, lowering()))
        return lowering

    return add


def lowers_mixin(mixin: type[nn.Module]) -> Callable[[type[Lowering]], type[Lowering]]:
    """Decorator of a lowering that names the class whose share of a layer it serves."""
    return lambda lowering: MIXINS.setdefault(mixin, lowering)


def lowering_of(part: nn.Module) -> Any:
    """The lowering of a part's exact class, Braid's own or another package's; None where there is none."""
    kind: Any = kind_of(part)
    if kind not in LOWERINGS and not kind.__module__.startswith("braidlm."):
        _load_third_party_lowerings()
    return LOWERINGS.get(kind) or _mixed_lowering(kind)


@cache
def _mixed_lowering(kind: Any) -> Any:
    """The lowering of a class that is made of a mixin and the class of a layer, if both have one."""
    mixin, *layers = kind.__bases__
    if len(layers) != 1 or mixin not in MIXINS or layers[0] not in LOWERINGS:
        return None
    return type(kind.__name__, (MIXINS[mixin], type(LOWERINGS[layers[0]])), {})()


@cache
def _load_third_party_lowerings() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # anything may go wrong in another package
            what = f"the lowerings of another package cannot be loaded ({type(error).__name__}: {error})"
            todo = "Fix, update or uninstall that package."
            raise BraidError(what, f"entry point '{entry.name}' ({entry.value})", todo) from error


def refusal(part: nn.Module, body: Any) -> str | None:
    """Why a part of a BraidModel runs its plain forward; None where kernels serve it."""
    reason, lowering = option_refusal(part), lowering_of(part)
    if reason is not None:
        return reason
    for name, child in part.named_modules() if lowering.is_one else [("", part)]:
        if lowering_of(child) is None and kind_of(child) not in NO_OPTIONS:
            return f"{name} is a {type(child).__name__}, which has no kernels"
        if isinstance(child, Dropout) and child.rate and child.kind not in DROPS:
            return f"its kernels do not know the option dropout.{child.kind}"
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{name or 'it'} has a forward hook"
    return lowering.reject(part, body)  # type: ignore[no-any-return]


def option_refusal(part: Any, is_bank: bool = False) -> str | None:
    """Why kernels do not serve a part, by its class and options; those of a bank's experts are the routed part's."""
    lowering = lowering_of(part)
    if lowering is None:
        return f"{type(part).__name__} has no kernels"
    for option in set_options(part.config):
        if option not in lowering.honours and not (is_bank and option.split(".")[0] == "experts"):
            return f"its kernels do not know the option {option}"
    return None


def set_options(config: Any, prefix: str = "") -> Iterator[str]:
    """The options of a configuration that do not have their default, and those without one."""
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if is_dataclass(value) and not isinstance(value, Choice):
            if not is_dataclass(default):
                yield name
            yield from set_options(value, f"{name}.")
        elif value != default:
            yield name
