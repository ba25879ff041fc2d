"""The contract of optimizers: torch optimizers, each with parameters of its own, that step as one; and AdamW."""

import fnmatch
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn, optim

from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Epsilon, Positive, Range, Rate
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf
from braidlm.model.routing.stacked import is_vector
from braidlm.training.schedules import schedules
from braidlm.training.step.spread import local

optimizers = Registry("optimizer")


@dataclass
class GroupConfig:
    """What is other for some parameters."""

    lr: Positive = 1.0
    """A factor of their learning rate."""
    weight_decay: Annotated[float, Range(at_least=0, at_most=1000)] = 1.0
    """A factor of their weight decay."""


@dataclass
class OptimizerConfig:
    """The options of AdamW, which every optimizer has for what AdamW trains."""

    lr: Positive = 1e-3
    """The maximum learning rate."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    """AdamW's decay rates of the averages of the gradient and of its square."""
    eps: Epsilon = 1e-8
    """Added by AdamW to the root of the second moment."""
    weight_decay: Annotated[float, Range(at_least=0, at_most=1000)] = 0.1
    """Decoupled weight decay: a step takes this share times its learning rate of every weight that decays."""
    decay_schedule: Annotated[Choice, PartOf(schedules)] | None = None
    """The decay over the training, from its first step to its last, as a share of `lr` x `weight_decay`: constant,
    linear, cosine or wsd. By default the decay follows the learning rate, warm-up included."""
    decay: Literal["matrices", "everything"] = "matrices"
    """What decays: matrices only, or also norms, biases and vectors, as in the papers."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Factors of rate and decay for some parameters, by patterns of their names: `{'*.bank.*': {weight_decay: 2}}`.
    The first pattern that fits a name counts."""

    def __post_init__(self) -> None:
        if self.groups and self.decay_schedule is not None:
            raise BraidError("groups: a decay with a schedule of its own is the same for all parameters")


ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")  # what torch's AdamW keeps for each parameter


class ScheduledDecay:
    """In each step weights are multiplied by 1 - strength x schedule; the factor is on the device for graph replay."""

    def __init__(self, strength: float, schedule: Any, parameters: list[Tensor]):
        self.strength, self.schedule, self.parameters = strength, schedules.build(schedule), parameters
        self.factor = torch.ones((), device=parameters[0].device if parameters else None)
        self.begin_step(0.0)

    def begin_step(self, share: float) -> None:
        """Set the factor of the next step, in place; `share` is the progress of the training."""
        self.factor.fill_(1 - self.strength * self.schedule(share))

    @torch.no_grad()
    def apply(self) -> None:
        """Shrink the weights that the next update changes; must not wait for the device."""
        if trained := [local(p) for p in self.parameters if p.grad is not None]:
            torch._foreach_mul_(trained, self.factor)


class Optimizer:
    """The base class; a registered one makes its `parts`."""

    Config: Any = OptimizerConfig

    def __init__(self, config: Any, model: nn.Module, matrices: Sequence[Tensor], capturable: bool = False):
        """`matrices` are those between embedding and head. With `capturable`, state and rates live on the device."""
        self.parts: list[optim.Optimizer] = self.make(config, model, matrices, capturable)
        self.decay: ScheduledDecay | None = None
        if config.decay_schedule is not None:
            decayed, _ = split_by_decay(model, config)
            self.decay = ScheduledDecay(config.lr * config.weight_decay, config.decay_schedule, decayed)

    def make(self, config: Any, model: nn.Module, matrices: Sequence[Tensor], capturable: bool) -> list[Any]:
        """The torch optimizers; each parameter that is trained belongs to one of them. One that is not AdamW has
        `state_keys`: what it keeps for each parameter and checkpoints save."""
        raise NotImplementedError("abstract: each optimizer has its own parts")

    def set_rate(self, rate: float) -> None:
        for part in self.parts:
            set_learning_rate(part, rate)

    def begin_step(self, share: float) -> None:
        """Called before each step, with the share of the training that is done."""
        if self.decay is not None:
            self.decay.begin_step(share)

    @property
    def decay_factors(self) -> dict[Tensor, Tensor]:
        """What the next step multiplies weights by whose decay has a schedule of its own; parts decay the others."""
        return {} if self.decay is None else dict.fromkeys(self.decay.parameters, self.decay.factor)

    def step(self) -> None:
        if self.decay is not None:
            self.decay.apply()
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def state_keys(part: optim.Optimizer) -> tuple[str, ...]:
    """What a torch optimizer keeps for each parameter, each a number or of the parameter's shape."""
    return getattr(part, "state_keys", ADAMW_STATE)


def set_learning_rate(optimizer: optim.Optimizer, rate: float) -> None:
    """Set every group's rate, in place where it is a tensor; a group's `lr_scale` is a factor of it."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def make_groups(
    model: nn.Module, config: OptimizerConfig, chosen: Set[Tensor], lr: float, capturable: bool
) -> list[dict[str, Any]]:
    """The chosen parameters in torch's groups, with weight decay and without; each has a learning rate of its own. A
    learning rate that is a tensor on the device can change between replays of a graph."""
    coupled = config.weight_decay if config.decay_schedule is None else 0.0
    device, patterns = next(model.parameters()).device, pattern_of(model, config)
    kinds: list[tuple[str | None, GroupConfig]] = [*config.groups.items(), (None, GroupConfig())]
    groups: list[dict[str, Any]] = []
    for members, decay in zip(split_by_decay(model, config), (coupled, 0.0), strict=True):
        for pattern, factors in kinds:
            if params := [p for p in members if p in chosen and patterns.get(p) == pattern]:
                rate: Any = torch.tensor(lr, device=device) if capturable else lr
                scales = {"weight_decay": decay * factors.weight_decay, "lr_scale": factors.lr}
                groups.append({"params": params, "lr": rate, **scales})
    return groups


def pattern_of(model: nn.Module, config: OptimizerConfig) -> dict[Tensor, str]:
    """The pattern of `config.groups` for each parameter that one fits; a pattern that fits none is an error."""
    # What trains holds the model as `model`, beside what extra losses learn.
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[Tensor, str] = {}
    for pattern in config.groups:
        fitting = [*fnmatch.filter(trained, pattern), *fnmatch.filter(trained, f"model.{pattern}")]
        if not fitting:
            some = ", ".join(name.removeprefix("model.") for name in list(trained)[-3:])
            todo = f"`*` stands for any letters: '*.bank.*'. The last parameters are {some}."
            raise BraidError(f"training.optimizer.groups: '{pattern}' fits no parameter that is trained", todo=todo)
        found = {**{trained[name]: pattern for name in fitting}, **found}
    return found


def split_by_decay(model: nn.Module, config: OptimizerConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with weight decay, and those without: vectors, and tensors with frozen rows, which would decay too."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    owned = [(module, parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    free = {parameter for module, parameter in owned if getattr(module, "trained_rows", None) is not None}
    if config.decay == "matrices":
        free |= {parameter for module, parameter in owned if is_vector(module, parameter)}
    return [p for p in trained if p not in free], [p for p in trained if p in free]


def decay_outlasts_rate(optimizer: Any, schedule: Any) -> str | None:
    """A warning that weights go on decaying where the learning rate has gone to zero, or None."""
    decays = optimizer.decay_schedule and optimizer.weight_decay and schedules.build(optimizer.decay_schedule)(1.0)
    if not decays or schedules.build(schedule)(1.0) > 0:
        return None
    return (
        "training.optimizer.decay_schedule: the learning rate ends at 0 and the decay does not, so that at the end the "
        "weights shrink and nothing is learned; let both end at 0, or give training.schedule.final"
    )


@optimizers.register("adamw")
class AdamW(Optimizer):
    """AdamW for all parameters."""

    def make(
        self, config: OptimizerConfig, model: nn.Module, matrices: Sequence[Tensor], capturable: bool
    ) -> list[optim.Optimizer]:
        return [make_adamw(model, config, capturable)]


def make_adamw(
    model: nn.Module,
    config: OptimizerConfig,
    capturable: bool = False,
    others: Set[Tensor] = frozenset(),
    lr_scale: float = 1.0,
) -> optim.AdamW:
    """Fused AdamW; with `capturable`, its state and learning rate live on the device for graph replay. `others` are
    parameters that another optimizer trains; `lr_scale` is a factor of the learning rate."""
    groups = make_groups(model, config, set(model.parameters()) - others, config.lr * lr_scale, capturable)
    return optim.AdamW(
        [{**group, "lr_scale": lr_scale * group["lr_scale"]} for group in groups],
        lr=groups[0]["lr"],
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=capturable,
    )
