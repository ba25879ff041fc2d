"""Joins: how parallel paths become one stream again. Those of PaPaformer choose by a Gumbel-softmax."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from ..config.ranges import NonNegative, Positive
from ..config.registry import Choice, Registry
from ..config.strict import PartOf
from ..errors import BraidError
from ..norms import norms
from ..routing.losses import check_losses
from ..routing.routing import COMBINED, Routing, Routings
from ..routing.stacked import without_residual
from ..span import Span

joins = Registry("join", third_party=True)


@dataclass
class JoinConfig:
    """The options of every join."""

    residual: bool = False
    """Whether the layer's input is added to the join's output."""
    norm: Annotated[Choice, PartOf(norms)] | None = None
    """A normalisation of each path's output before the join; by default none."""


@dataclass(frozen=True)
class JoinShape:
    """The names and sizes of what a join connects."""

    names: tuple[str, ...]  # names of the paths
    widths: tuple[int, ...]  # widths of the paths' outputs
    width_in: int  # width of the stream into the layer
    width_out: int  # width of the stream out of the layer


class Join(nn.Module):
    """The base class: `join` takes the paths' outputs and their input stream, and returns one stream and routings."""

    Config: Any = JoinConfig
    keeps_paths_separate = False  # whether a path reads only its own slice of the stream in the next layer
    chooses_paths = False  # whether it has a router that chooses among the paths before they are computed

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__()
        self.config, self.names, self.width_out = config, shape.names, shape.width_out
        self.address = ""  # the module name of this join, set by the model
        self.inactive: frozenset[str] = frozenset()  # names of inactive paths, which add nothing to the output
        self.residual = config.residual
        if config.residual and shape.width_in != shape.width_out:
            raise BraidError(
                f"a residual around the join needs equal widths, and here {shape.width_in} becomes {shape.width_out}; "
                "leave out `to` and put a project stage after the parallel one"
            )
        self.norms = None
        if config.norm is not None:
            self.norms = nn.ModuleList(norms.build(config.norm, width) for width in shape.widths)

    def forward(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        if self.norms is not None:
            outputs = [norm(x).to(x.dtype) for norm, x in zip(self.norms, outputs, strict=True)]
        joined, routings = self.join(outputs, stream)
        return (stream + joined if self.residual else joined), routings

    def run(self, layer: Any, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """The paths of a layer, joined."""
        outputs, routings = layer.outputs(hidden, span)
        joined, own = self(outputs, hidden)
        return joined, routings + own

    def set_costs(self, layer: Any) -> None:
        """Say which share of a layer's paths is active for a token; by default all."""

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        raise NotImplementedError("each join implements this")

    def active(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, with zeros for inactive paths."""
        if not self.inactive:
            return outputs
        pairs = zip(self.names, outputs, strict=True)
        return [torch.zeros_like(x) if name in self.inactive else x for name, x in pairs]


@joins.register("shared_linear")
class SharedLinear(Join):
    """One linear layer reads the concatenated outputs of all paths (PaPaformer's best)."""

    @dataclass
    class Config(JoinConfig):
        bias: bool = False
        """Whether the layer has a bias."""

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(config, shape)
        self.linear = without_residual(nn.Linear(sum(shape.widths), shape.width_out, bias=config.bias))

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        return self.linear(torch.cat(self.active(outputs), dim=-1)), ()


@joins.register("concat")
class Concat(Join):
    """Concatenation: each path reads its own slice in the next layer, so that paths never mix inside the stage."""

    keeps_paths_separate = True

    def __init__(self, config: JoinConfig, shape: JoinShape):
        super().__init__(config, shape)
        if shape.width_out != sum(shape.widths):
            raise BraidError(
                f"widths do not add up: the paths have {' + '.join(map(str, shape.widths))} = {sum(shape.widths)} "
                f"and concat must give {shape.width_out}"
            )

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        return torch.cat(self.active(outputs), dim=-1), ()


class SameWidthJoin(Join):
    """A base class for joins that first project the paths' outputs to the width of the stream."""

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__(config, shape)
        self.leave = nn.ModuleDict(
            {
                name: without_residual(nn.Linear(width, shape.width_in, bias=False))
                for name, width in zip(shape.names, shape.widths, strict=True)
                if width != shape.width_in
            }
        )
        projects = shape.width_out != shape.width_in
        self.out = without_residual(nn.Linear(shape.width_in, shape.width_out, bias=False)) if projects else None

    def to_stream_width(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, projected where their width differs from the stream's."""
        return [self.leave[name](x) if name in self.leave else x for name, x in zip(self.names, outputs, strict=True)]

    def to_width_out(self, joined: Tensor) -> Tensor:
        return joined if self.out is None else self.out(joined)


@joins.register("add")
class Add(SameWidthJoin):
    """The change that each path makes is added to the stream, which itself is added once."""

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        pairs = zip(self.names, self.to_stream_width(outputs), strict=True)
        active = {name: x for name, x in pairs if name not in self.inactive}
        # A path of the stream's width returns stream + change; a projected or normalised output is a change alone.
        streams = 0 if self.norms is not None else sum(name not in self.leave for name in active)
        return self.to_width_out(sum(active.values(), start=(1 - streams) * stream)), ()


class GumbelJoin(SameWidthJoin):
    """The weighted sum of the paths and of their combination.

    In training the weights are sampled (Gumbel-softmax, straight-through with `hard`); in evaluation the most probable
    choice has weight 1, so that the output is deterministic.
    """

    reads_combined: bool
    """Whether the router reads the linear combination of all paths, or their concatenated outputs."""

    @dataclass
    class Config(JoinConfig):
        sample: Literal["gumbel", "softmax"] = "gumbel"
        """gumbel: sampled choices in training; softmax: no noise, every choice is weighted by its probability."""
        hard: bool = True
        """With gumbel: one choice per token forward, straight-through gradients; otherwise soft weights."""
        temperature: Positive = 1.0
        """Sharpness of the weights: lower is sharper. With gumbel, `training.temperature` gives it a schedule."""
        losses: dict[str, NonNegative] = field(default_factory=dict)
        """Routing losses and their weights, e.g. {token_entropy: 0.01, load_balance: 0.01}."""

        def __post_init__(self) -> None:
            check_losses(self.losses)

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(config, shape)
        if COMBINED in shape.names:
            raise BraidError(f"a path cannot be called '{COMBINED}' here: that is the name of all paths together")
        self.is_noisy, self.temperature_scale = config.sample == "gumbel", 1.0
        """A schedule changes it between steps."""
        self.choices = (*shape.names, COMBINED)
        self.combine = without_residual(nn.Linear(sum(shape.widths), shape.width_in))
        self.router = nn.Linear(shape.width_in if self.reads_combined else sum(shape.widths), len(self.choices))

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        concatenated = torch.cat(self.active(outputs), dim=-1)
        combined = self.combine(concatenated)
        scores_BTN = self.router(combined if self.reads_combined else concatenated).float()
        if self.inactive:
            inactive = torch.tensor([name in self.inactive for name in self.choices], device=scores_BTN.device)
            scores_BTN = scores_BTN.masked_fill(inactive, -torch.inf)
        weights_BTN, probabilities_BTN = self.weigh(scores_BTN), scores_BTN.softmax(-1)
        outputs = [*self.to_stream_width(outputs), combined]
        joined = sum(w * x for w, x in zip(weights_BTN.to(combined.dtype).split(1, dim=-1), outputs, strict=True))
        all_choices, losses = torch.arange(len(self.choices), device=stream.device), dict(self.config.losses)
        chosen = all_choices.expand_as(scores_BTN)
        routing = Routing(self.address, self.choices, probabilities_BTN, chosen, weights_BTN, losses, scores_BTN)
        return self.to_width_out(joined), (routing,)

    def weigh(self, scores_BTN: Tensor) -> Tensor:
        """The weight of each choice for each token."""
        if not self.is_noisy:  # without the schedule, which would change the output in evaluation
            return (scores_BTN / self.config.temperature).softmax(-1)
        if not self.training:
            return nn.functional.one_hot(scores_BTN.argmax(-1), len(self.choices)).to(scores_BTN.dtype)
        noise = -torch.empty_like(scores_BTN).exponential_().clamp_min(1e-20).log()
        soft = ((scores_BTN + noise) / (self.config.temperature * self.temperature_scale)).softmax(-1)
        if not self.config.hard:
            return soft
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return hard + (soft - soft.detach())  # the brackets make it exactly 0 or 1


@joins.register("gumbel_v1")
class GumbelV1(GumbelJoin):
    """The router reads the combined representation."""

    reads_combined = True


@joins.register("gumbel_v2")
class GumbelV2(GumbelJoin):
    """The router reads the concatenated outputs of the paths."""

    reads_combined = False


def scale_temperature(model: nn.Module, scale: float) -> None:
    """Set every Gumbel join of a model to `scale` times its configured temperature."""
    for module in model.modules():
        if isinstance(module, GumbelJoin):
            module.temperature_scale = scale
