"""AdamW over parameter groups."""

from collections.abc import Sequence, Set

from torch import Tensor, nn, optim, tensor

from braidlm.training.step.optimizers.contract import Optimizer, OptimizerConfig, optimizers, split_by_decay


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
    decayed, free = split_by_decay(model, config)
    groups = [
        {"params": [p for p in decayed if p not in others], "weight_decay": config.weight_decay},
        {"params": [p for p in free if p not in others], "weight_decay": 0.0},
    ]
    # A learning rate that is a tensor can change between replays; each group needs its own.
    device = next(model.parameters()).device
    lr = config.lr * lr_scale
    rate = (lambda: tensor(lr, device=device)) if capturable else (lambda: lr)
    return optim.AdamW(
        [{**group, "lr": rate(), "lr_scale": lr_scale} for group in groups if group["params"]],
        lr=rate(),
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=capturable,
    )
