"""A run that goes on under a larger budget than its checkpoint had."""

from dataclasses import replace
from typing import Any

from braidlm.core import console
from braidlm.core.models.runs import training_of
from braidlm.training.config import TrainingConfig
from braidlm.training.monitoring.progress import Progress
from braidlm.training.run_folder import budget_of
from braidlm.training.step.learning_rate import LearningRate


def earlier_budgets(lineage: dict[str, Any], training: TrainingConfig, progress: Progress) -> list[dict[str, Any]]:
    """The budgets under which the steps so far were trained, each with the step that it was used up to.

    Says what a larger one means for the learning rate.
    """
    budgets = list(training_of(lineage).get("earlier_budgets") or [])
    before = budget_of(lineage.get("recipe"))
    if before is None or before == training.budget:
        return budgets
    was, now = (LearningRate(each)(progress, progress) for each in (replace(training, budget=before), training))
    console.say(
        f"The budget was {before} and is {training.budget}. From here on schedules are those of the larger budget: "
        f"the learning rate was {was:.3g} and goes on at {now:.3g}."
    )
    return [*budgets, {"budget": str(before), "until_step": progress.steps}]
