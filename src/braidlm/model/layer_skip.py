"""LayerSkip: layers that texts pass by at random in training, and passes that end after an early layer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .dropout import Dropout, DropoutConfig, set_rates
from .errors import BraidError
from .routing.routing import Routings
from .span import Span


class LayerDropout(Dropout):
    """In training each text of a batch passes by a layer with this probability; nothing is scaled in return."""

    is_recorded = False
    passing: Tensor | None = None
    """The probability on a device, where a captured or compiled step reads it, once its scale was set."""

    def __init__(self, rate: float, layer: nn.Module):
        super().__init__(rate)
        self.can_skip_rows = not any(hasattr(part, "address") for part in layer.modules())
        """Whether the layer may see the other texts alone: losses of routers read the routings of all texts."""

    def set_scale(self, scale: float, device: torch.device) -> None:
        super().set_scale(scale, device)
        if device.type != "cpu":
            self.passing = torch.zeros((), device=device) if self.passing is None else self.passing
            self.passing.fill_(self.rate * scale)

    def run(self, layer: Callable[..., Any], hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """Run a layer."""
        probability: Any = self.passing
        if self.passing is None or not self.training or self.rate == 0.0:
            probability = self.probability
            if probability == 0.0:
                return layer(hidden, span)  # type: ignore[no-any-return]
        kept = torch.rand(len(hidden), device=hidden.device) >= probability
        return self.run_kept(kept, layer, hidden, span)

    def run_kept(self, kept: Tensor, layer: Callable[..., Any], hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """Run a layer of which only some texts [text] take the output."""
        output, routings = layer(hidden, span)
        return torch.where(kept[:, None, None], output, hidden), routings


def set_dropout(stages: nn.ModuleList, width: int, rates: DropoutConfig) -> None:
    """Give parts outside of blocks their rates, and layers one that rises from 0 to that of the last, exponentially. A
    layer that changes the stream's width has none, and with a rate of 0 no layer has."""
    set_rates(stages, rates)
    last, number = sum(len(layers_of(stage)) for stage in stages) - 1, 0
    for stage in stages if rates.layer else ():
        drops = nn.ModuleList()
        for layer in layers_of(stage):
            width_out: Any = getattr(layer, "width_out", width)
            drops.append(LayerDropout(rates.layer * (2 ** (number / max(last, 1)) - 1) * (width_out == width), layer))
            width, number = width_out, number + 1
        if len(drops):
            stage.drops = drops
        width = stage.width_out  # type: ignore[assignment]


def layers_of(stage: nn.Module) -> Any:
    """The layers of a stage; a projection has none."""
    return getattr(stage, "layers", ())


def exit_layers(stages: nn.ModuleList, width: int) -> list[int]:
    """How many layers a pass may end after, those of all stages counted: where the stream has the head's width."""
    widths = [getattr(layer, "width_out", stage.width_out) for stage in stages for layer in layers_of(stage)]
    return [number for number, own in enumerate(widths, start=1) if own == width]


def check_exit(stages: nn.ModuleList, width: int, layer: int) -> None:
    """Refuse a layer after which the stream cannot go to the head."""
    exits = exit_layers(stages, width)
    if layer not in exits:
        todo = f"The stream has the head's width, {width}, after layers {', '.join(map(str, exits)) or 'none'}."
        raise BraidError(f"the model cannot be left after layer {layer}", todo=todo)


def cache_slots(stages: nn.ModuleList, last: int) -> int:
    """How many layers of a cache a pass fills that ends after layer `last`."""
    layers = [layer for stage in stages for layer in layers_of(stage)][:last]
    return sum(hasattr(module, "cache_slot") for layer in layers for module in layer.modules())


def stages_between(stages: nn.ModuleList, first: int = 0, last: int | None = None) -> Iterable[Callable[..., Any]]:
    """What leads from the stream after layer `first` to that after layer `last`, by default the end. Layers of all
    stages are counted; of a stage at either end some layers are left out. A projection between two layers belongs to
    the later one."""
    if first == 0 and last is None:
        return stages
    found: list[Callable[..., Any]] = []
    begin = 0
    for stage in stages:
        depth = len(layers_of(stage))
        if begin >= first and (last is None or begin + max(depth, 1) <= last):
            found.append(stage)
        elif chosen := range(max(first - begin, 0), depth if last is None else min(last - begin, depth)):
            found.append(partial(stage.run_some, chosen))  # type: ignore[arg-type, misc, operator]
        begin += depth
    return found


def run_layers(
    stages: nn.ModuleList, hidden: Tensor, span: Span, first: int = 0, last: int | None = None
) -> tuple[Tensor, Routings]:
    """The stream after layer `last` (by default the end) from that after layer `first`, and the routings between."""
    routings: Routings = ()
    for stage in stages_between(stages, first, last):
        hidden, chosen = stage(hidden, span)
        routings += chosen
    return hidden, routings
