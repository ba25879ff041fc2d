"""AdamW over parameter groups, and its learning rate."""

from torch import Tensor, nn, optim, tensor

from braidlm.model.routing.stacked import is_vector
from braidlm.training.monitoring.progress import Progress
from braidlm.training.recipe import OptimizerConfig, TrainingConfig
from braidlm.training.schedules import schedules


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
    """Parameters with weight decay, and those without: vectors, and tensors with frozen rows, which would decay too."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    owned = [(module, parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    free = {parameter for module, parameter in owned if getattr(module, "trained_rows", None) is not None}
    if config.decay == "matrices":
        free |= {parameter for module, parameter in owned if is_vector(module, parameter)}
    return [p for p in trained if p not in free], [p for p in trained if p in free]


def set_learning_rate(optimizer: optim.Optimizer, rate: float) -> None:
    """Set every group's rate, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class LearningRate:
    """The learning rate of a step: a warm-up, then a schedule over the rest of the budget.

    Called with the progress before and after the step.
    """

    def __init__(self, config: TrainingConfig):
        self.max_rate, self.warmup, self.budget = config.optimizer.lr, config.warmup, config.budget
        self.schedule = schedules.build(config.schedule)

    def __call__(self, before: Progress, after: Progress) -> float:
        return self.max_rate * self._warmup_factor(after) * self.schedule(self._schedule_progress(before))

    def _warmup_factor(self, after: Progress) -> float:
        """The share of the warm-up that is done after the step, so that the first step has a rate above zero."""
        if not self.warmup.count:
            return 1.0
        return min(after.done(self.warmup.unit) / self.warmup.count, 1.0)

    def _schedule_progress(self, before: Progress) -> float:
        """Progress from the end of the warm-up to the end of the budget, which may be counted in another unit."""
        share, warmed = before.share(self.budget), before.done(self.warmup.unit)
        if warmed <= self.warmup.count:
            return 0.0
        end_of_warmup = share * self.warmup.count / warmed
        return (share - end_of_warmup) / (1 - end_of_warmup)
