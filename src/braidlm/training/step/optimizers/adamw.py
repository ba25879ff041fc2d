"""AdamW over parameter groups."""

from collections.abc import Sequence, Set

from torch import Tensor, nn, optim

from braidlm.training.step.optimizers.contract import Optimizer, OptimizerConfig, make_groups, optimizers


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
    """Fused AdamW; with `capturable`, its state and learning rate live on the device for graph replay.

    `others` are parameters that another optimizer trains; `lr_scale` is a factor of the learning rate.
    """
    groups = make_groups(model, config, set(model.parameters()) - others, config.lr * lr_scale, capturable)
    return optim.AdamW(
        [{**group, "lr_scale": lr_scale} for group in groups],
        lr=groups[0]["lr"],
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=capturable,
    )
