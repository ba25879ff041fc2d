"""The learning rate of every step: a warm-up, then a schedule over what is left of the budget."""

from braidlm.training.progress import Progress
from braidlm.training.recipe import TrainingConfig
from braidlm.training.schedules import schedules


class LearningRate:
    """Called with the progress before and after a step, gives that step's rate."""

    def __init__(self, config: TrainingConfig):
        self.highest, self.warmup, self.budget = config.optimizer.lr, config.warmup, config.budget
        self.curve = schedules.build(config.schedule)

    def __call__(self, before: Progress, after: Progress) -> float:
        return self.highest * self._risen(after) * self.curve(self._into_schedule(before))

    def _risen(self, after: Progress) -> float:
        """How far the warm-up has come, the coming step counted in: the first is not wasted on a rate of zero."""
        if not self.warmup.count:
            return 1.0
        return min(after.done(self.warmup.unit) / self.warmup.count, 1.0)

    def _into_schedule(self, before: Progress) -> float:
        """Progress from the end of the warm-up to the end of the budget, which may be counted in another unit."""
        share, warmed = before.share(self.budget), before.done(self.warmup.unit)
        if warmed <= self.warmup.count:
            return 0.0
        end_of_warmup = share * self.warmup.count / warmed
        return (share - end_of_warmup) / (1 - end_of_warmup)
