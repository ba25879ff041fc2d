"""The contract of optimizers: torch optimizers, each with parameters of its own, that step as one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor, nn, optim

from braidlm.model.config.ranges import Epsilon, Positive, Range, Rate
from braidlm.model.config.registry import Registry
from braidlm.model.routing.stacked import is_vector

optimizers = Registry("optimizer")


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
    """Decoupled weight decay."""
    decay: Literal["matrices", "everything"] = "matrices"
    """What decays: matrices only, or also norms, biases and vectors, as in the papers."""


ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
"""What torch's AdamW keeps for each parameter."""


class Optimizer:
    """The base class; a registered one makes its `parts`."""

    Config: Any = OptimizerConfig

    def __init__(self, config: Any, model: nn.Module, matrices: Sequence[Tensor], capturable: bool = False):
        """`matrices` are those between embedding and head. With `capturable`, state and rates live on the device."""
        self.parts: list[optim.Optimizer] = self.make(config, model, matrices, capturable)

    def make(self, config: Any, model: nn.Module, matrices: Sequence[Tensor], capturable: bool) -> list[Any]:
        """The torch optimizers; each parameter that is trained belongs to one of them.

        One that is not AdamW has `state_keys`: what it keeps for each parameter and checkpoints save.
        """
        raise NotImplementedError("abstract: each optimizer has its own parts")

    def set_rate(self, rate: float) -> None:
        for part in self.parts:
            set_learning_rate(part, rate)

    def step(self) -> None:
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


def split_by_decay(model: nn.Module, config: OptimizerConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with weight decay, and those without: vectors, and tensors with frozen rows, which would decay too."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    owned = [(module, parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    free = {parameter for module, parameter in owned if getattr(module, "trained_rows", None) is not None}
    if config.decay == "matrices":
        free |= {parameter for module, parameter in owned if is_vector(module, parameter)}
    return [p for p in trained if p not in free], [p for p in trained if p in free]
