"""AdamW over parameter groups."""

from torch import Tensor, nn, optim, tensor

from braidlm.model.routing.stacked import is_vector
from braidlm.training.recipe import OptimizerConfig


def make_adamw(model: nn.Module, config: OptimizerConfig, capturable: bool = False) -> optim.AdamW:
    """Fused AdamW; with `capturable`, its state and learning rate live on the device for graph replay."""
    decayed, free = split_by_decay(model, config)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    device = next(model.parameters()).device
    # A learning rate that is a tensor can change between replays; each group needs its own.
    rate = (lambda: tensor(config.lr, device=device)) if capturable else (lambda: config.lr)
    return optim.AdamW(
        [{**group, "lr": rate()} for group in groups if group["params"]],
        lr=rate(),
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=capturable,
    )


def split_by_decay(model: nn.Module, config: OptimizerConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that are pulled towards zero, and those that are not."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if config.decay == "everything":
        return trained, []
    vectors = {p for m in model.modules() for p in m.parameters(recurse=False) if is_vector(m, p)}
    return [p for p in trained if p not in vectors], [p for p in trained if p in vectors]


def set_learning_rate(optimizer: optim.Optimizer, rate: float) -> None:
    """Set every group's rate, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
