"""Learning dynamics: how the scores of a run's checkpoints move around their mean (Figures 3 to 5 of MoEP).

For each task: the deviation of every checkpoint from the task's mean over all checkpoints, in the task's standard
deviations over the checkpoints, so that tasks of different scales have one axis and one weight; where lower is better
(bits per byte) the sign is flipped, so that up is always better. Then smoothed: a centred moving average of three
checkpoints, of two at the ends. The best checkpoint has the highest smoothed deviation on average over the tasks, and
of equal ones the highest deviation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from braidlm.evals.results import ModelResults

SMOOTHING = 3
"""The window of the moving average, in checkpoints."""
NOISE = 2.0
"""A task whose checkpoints differ by less than this many standard errors of one score is called noisy."""
UNITS = ("words", "tokens", "steps")


@dataclass(frozen=True)
class Dynamics:
    """The learning dynamics of one run."""

    run: str
    unit: str
    """The unit of `amounts`: words, tokens or steps of training; `checkpoint` where folders do not say."""
    amounts: list[float]
    names: list[str]
    scores: dict[str, list[float]]
    """By task, as they were measured."""
    deviations: dict[str, list[float]]
    """By task: from its mean, in its standard deviations, up is better."""
    smoothed: dict[str, list[float]]
    noisy: dict[str, tuple[float, float]]
    """Tasks whose scores hardly change: their standard deviation over the checkpoints, and the mean standard error."""

    @property
    def mean(self) -> list[float]:
        """Smoothed deviation of each checkpoint, on average over the tasks."""
        return np.mean(list(self.smoothed.values()), axis=0).tolist()

    @property
    def best(self) -> int:
        """The checkpoint with the highest mean; of equal ones, as two always are, the one with the best scores."""
        own = np.mean(list(self.deviations.values()), axis=0)
        return int(np.argmax(np.where(np.isclose(self.mean, max(self.mean)), own, -np.inf)))


Scale = Mapping[str, tuple[float, float]]
"""For each task the mean and the standard deviation."""


def run_dynamics(run: str, checkpoints: Sequence[ModelResults], scale: Scale | None = None) -> Dynamics:
    """The dynamics of one run; deviations are from its own mean unless another scale is given."""
    scores = {task: [model.tasks[task].score for model in checkpoints] for task in checkpoints[0].tasks}
    own_scale = task_scale([checkpoints])
    deviations, noisy = {}, {}
    for task, values in scores.items():
        mean, spread = (scale or own_scale)[task]
        sign = 1.0 if checkpoints[0].tasks[task].higher_is_better else -1.0
        deviations[task] = [sign * (value - mean) / spread if spread > 0 else 0.0 for value in values]
        errors = [model.tasks[task].standard_error for model in checkpoints]
        known = [error for error in errors if error is not None]
        if known and own_scale[task][1] < NOISE * float(np.mean(known)):
            noisy[task] = (own_scale[task][1], float(np.mean(known)))
    # The amount of training of each checkpoint, in the first unit that is known for all.
    unit = next((unit for unit in UNITS if all(getattr(model, unit) for model in checkpoints)), "checkpoint")
    amounts = range(1, len(checkpoints) + 1) if unit == "checkpoint" else [getattr(each, unit) for each in checkpoints]
    return Dynamics(
        run=run,
        unit=unit,
        amounts=[float(amount) for amount in amounts],
        names=[model.name.removeprefix(f"{run}/") for model in checkpoints],
        scores=scores,
        deviations=deviations,
        smoothed={task: smooth(values) for task, values in deviations.items()},
        noisy=noisy,
    )


def compare_runs(runs: Mapping[str, Sequence[ModelResults]]) -> list[Dynamics]:
    """Several runs on one scale: deviations are from the mean over the checkpoints of all of them."""
    scale = task_scale(list(runs.values()))
    return [run_dynamics(name, checkpoints, scale) for name, checkpoints in runs.items()]


def task_scale(runs: Sequence[Sequence[ModelResults]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each task over all checkpoints."""
    scale = {}
    for task in runs[0][0].tasks:
        values = np.array([model.tasks[task].score for checkpoints in runs for model in checkpoints])
        scale[task] = (float(values.mean()), float(values.std()))
    return scale


def smooth(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """A centred moving average; at the ends over as many as there are."""
    half = width // 2
    return [float(np.mean(values[max(0, at - half) : at + half + 1])) for at in range(len(values))]


def best_sentence(run: Dynamics) -> str:
    """Which checkpoint is best, in words."""
    at = run.best
    over = f"{len(run.names)} checkpoints and {len(run.scores)} task{'s' if len(run.scores) > 1 else ''}"
    scores = ", ".join(f"{task} {values[at]:.4g}" for task, values in run.scores.items())
    where = f" ({run.amounts[at]:,.0f} {run.unit})" if run.unit != "checkpoint" else ""
    text = f"`{run.run}`: the best of {over} is `{run.names[at]}`{where}: {scores}."
    if not run.noisy:
        return text
    tasks = ", ".join(f"`{task}` ({spread:.2g} and {error:.2g})" for task, (spread, error) in run.noisy.items())
    return (
        f"{text} Mind that much is chance where the standard deviation over the checkpoints is not much more than the "
        f"standard error of one score: {tasks}."
    )
