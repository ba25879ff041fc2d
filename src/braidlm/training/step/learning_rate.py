"""The learning rate of every step."""

from braidlm.training.config import TrainingConfig
from braidlm.training.monitoring.progress import Progress
from braidlm.training.schedules import schedules


class LearningRate:
    """The learning rate of a step: a warm-up, then a schedule over the rest of the budget.

    Called with the progress before and after the step.
    """

    def __init__(self, config: TrainingConfig):
        self.max_rate, self.warmup, self.budget = config.optimizer.options.lr, config.warmup, config.budget
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
