"""Learning dynamics: how the scores of a run's checkpoints move around their mean (Figures 3 to 5 of MoEP).

For each task: the deviation of every checkpoint from the task's mean over all checkpoints, in the task's standard
deviations over the checkpoints, so that tasks of different scales have one axis and one weight; where lower is better
(bits per byte) the sign is flipped, so that up is always better. Then smoothed: a centred moving average of three
checkpoints, of two at the ends. The best checkpoint has the highest smoothed deviation on average over the tasks, and
of equal ones the highest deviation. A task counts there by the share of its variance over the checkpoints that is not
the standard error of its scores: one that only fluctuates does not count. The report is dynamics.html and
dynamics.json; the terminal's, of any evaluation, names the best checkpoint of each run below the scores.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from braidlm.core.report.report import Lines, Report, Table, listed
from braidlm.evals.babylm.averages import averages
from braidlm.evals.reports.scores import (
    AMOUNTS,
    add_method,
    explanations,
    other_measures,
    run_table,
    score_cell,
    score_table,
    sentence,
)
from braidlm.evals.results import Evaluation, ModelResults

SMOOTHING = 3
"""The window of the moving average, in checkpoints."""
CLEAR = 2.0
"""Checkpoints that are less than this many standard errors behind the best may be as good."""
FEW_TASKS = 2
"""The terminal shows what so many tasks measure beside their scores: a score of 0 may not be all that was found."""
FULL = 0.95
"""A task that counts by less than this share is named."""


@dataclass(frozen=True)
class Dynamics:
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
    errors: dict[str, list[float | None]]
    """By task: the standard errors of the scores, from their items."""
    weights: dict[str, float]
    """By task: the share of its variance over the checkpoints that is not the standard error of its scores."""
    mean: list[float]
    """Smoothed deviation of each checkpoint, on average over the tasks by these weights."""
    mean_errors: list[float]
    """The standard errors of the means, as far as the errors of the scores are known."""

    @property
    def as_good(self) -> list[str]:
        """The other checkpoints that may be as good as the best."""
        best, errors = self.best, self.mean_errors
        others = (at for at in range(len(self.names)) if at != best)
        near = (at for at in others if self.mean[best] - self.mean[at] < CLEAR * np.hypot(errors[best], errors[at]))
        return [self.names[at] for at in near]

    @property
    def best(self) -> int:
        """The checkpoint with the highest mean; of equal ones, as two always are, the one with the best scores."""
        own = _weighted(self.deviations, self.weights)
        return int(np.argmax(np.where(np.isclose(self.mean, max(self.mean)), own, -np.inf)))


Scale = Mapping[str, tuple[float, float, float]]
"""For each task the mean, the standard deviation, and the share of the variance that is not the error of the scores."""


def run_dynamics(run: str, checkpoints: Sequence[ModelResults], scale: Scale | None = None) -> Dynamics:
    """The dynamics of one run; deviations are from its own mean unless another scale is given."""
    scores = {task: [model.tasks[task].score for model in checkpoints] for task in checkpoints[0].tasks}
    errors = {task: [model.tasks[task].standard_error for model in checkpoints] for task in scores}
    scale = scale or task_scale([checkpoints])
    deviations, variances = {}, {}
    for task, values in scores.items():
        mean, spread, _ = scale[task]
        sign = 1.0 if checkpoints[0].tasks[task].higher_is_better else -1.0
        deviations[task] = [sign * (value - mean) / spread if spread > 0 else 0.0 for value in values]
        variances[task] = [((error or 0.0) / spread) ** 2 if spread > 0 else 0.0 for error in errors[task]]
    weights = {task: weight for task, (_, _, weight) in scale.items()}
    # The amount of training of each checkpoint, in the first unit that is known for all.
    unit = next((unit for unit in AMOUNTS if all(getattr(model, unit) for model in checkpoints)), "checkpoint")
    amounts = range(1, len(checkpoints) + 1) if unit == "checkpoint" else [getattr(each, unit) for each in checkpoints]
    names = [model.name.removeprefix(f"{run}/") for model in checkpoints]
    smoothed = {task: smooth(values) for task, values in deviations.items()}
    # The variance of a mean of n scores is their mean variance divided by n, and weights count squared.
    half, shares = SMOOTHING // 2, _shares(weights)
    counts = [len(names[max(0, at - half) : at + half + 1]) for at in range(len(names))]
    squared = {task: [shares[task] * value for value in smooth(values)] for task, values in variances.items()}
    return Dynamics(
        run=run,
        unit=unit,
        amounts=list(map(float, amounts)),
        names=names,
        scores=scores,
        deviations=deviations,
        smoothed=smoothed,
        errors=errors,
        weights=weights,
        mean=_weighted(smoothed, weights).tolist(),
        mean_errors=np.sqrt(_weighted(squared, weights) / counts).tolist(),
    )


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to 1; equal ones where no task counts."""
    whole = sum(weights.values())
    return {task: weight / whole if whole else 1 / len(weights) for task, weight in weights.items()}


def _weighted(values: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> np.ndarray:
    """The mean over the tasks, for each checkpoint."""
    return np.sum([share * np.array(values[task]) for task, share in _shares(weights).items()], axis=0)


def compare_runs(runs: Mapping[str, Sequence[ModelResults]]) -> list[Dynamics]:
    """Several runs on one scale: deviations are from the mean over the checkpoints of all of them."""
    scale = task_scale(list(runs.values()))
    return [run_dynamics(name, checkpoints, scale) for name, checkpoints in runs.items()]


def task_scale(runs: Sequence[Sequence[ModelResults]]) -> dict[str, tuple[float, float, float]]:
    """Mean and standard deviation of each task over all checkpoints, and how much of its variance is no error."""
    scale = {}
    for task in runs[0][0].tasks:
        results = [model.tasks[task] for checkpoints in runs for model in checkpoints]
        values = np.array([result.score for result in results])
        chance = float(np.mean([(result.standard_error or 0.0) ** 2 for result in results]))
        weight = max(0.0, 1.0 - chance / float(values.var())) if values.var() > 0 else 0.0
        scale[task] = (float(values.mean()), float(values.std()), weight)
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
    if at < len(run.names) - 1:
        last = ", ".join(f"{task} {values[-1]:.4g}" for task, values in run.scores.items())
        text += f" The last, `{run.names[-1]}`, has {last}."
    sure = []
    if as_good := run.as_good:
        of = listed([f"`{name}`" for name in as_good]) if len(as_good) <= FEW else f"{len(as_good)} others"
        sure.append(f"{of} may be as good, within {CLEAR:g} standard errors.")
    if any(run.weights.values()):
        parts = [f"`{task}` by {weight:.0%}" for task, weight in run.weights.items() if weight < FULL]
        if parts:
            sure.append(
                f"A task counts as far as its scores differ by more than their standard errors: {listed(parts)}."
            )
    else:
        sure.append("On no task do the checkpoints differ by more than the standard errors of their scores.")
    return f"{text}\n\nHow sure: {' '.join(sure)}" if sure else text


FEW = 4
"""So many checkpoints are named."""
TASKS_PER_TABLE = 3
LOG_AXIS_RATIO = 20
"""Amounts of training that differ by more than this factor have a logarithmic axis: 1M to 100M words."""
DEVIATION = "standard deviations, smoothed"
MEAN = "mean of the tasks"


def short_report(evaluation: Evaluation) -> Report:
    """The report for the terminal: the table, what it needs to be read, and the best checkpoint of each run."""
    report = Report("Scores").table(score_table(evaluation))
    for line in explanations(evaluation, strong="*"):
        report.text(line)
    for task, result in evaluation.models[0].tasks.items():
        if result.also and len(evaluation.tasks) <= FEW_TASKS and not evaluation.runs:
            report.heading(f"{task} by other measures", 3).table(other_measures(evaluation, task))
    if evaluation.over_runs:
        report.table(run_table(evaluation))
    for name, checkpoints in evaluation.runs.items():
        report.text(best_sentence(run_dynamics(name, checkpoints)))
    return report


def dynamics_report(evaluation: Evaluation) -> Report:
    """The best checkpoints, the charts of each run, then the numbers."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in evaluation.runs.items()]
    facts = [{**asdict(run), "best": run.names[run.best], "as_good": run.as_good} for run in runs]
    report = Report("Learning dynamics", f"Every checkpoint of {listed([run.run for run in runs])} on every task")
    report.verdict = "\n\n".join(map(best_sentence, runs))
    report.data["dynamics"] = {"format": 1, "runs": facts}
    if len(runs) == 1:
        report.facts(_key_figures(runs[0], evaluation))
    else:
        compared = compare_runs(evaluation.runs)
        first, second, *_ = sorted(compared, key=lambda run: run.mean[run.best], reverse=True)
        heights = [(run.mean[run.best], run.mean_errors[run.best]) for run in (first, second)]
        at, next_at = (f"{height:+.2f}" + (f" ± {error:.2f}" if error else "") for height, error in heights)
        (highest, error), (next_highest, next_error) = heights
        is_clear = highest - next_highest > CLEAR * np.hypot(error, next_error)
        of = f"Of {len(runs)} runs," if is_clear else f"No clear winner of {len(runs)} runs:"
        report.verdict = (
            f"{of} {first.run} gets highest: its best checkpoint is {at} standard deviations from the mean of all, on "
            f"average over tasks; {second.run} gets to {next_at}.\n\n{report.verdict}"
        )
        _add_comparison(report, compared)
    report.heading("Around the mean").text(
        "For each task how far a checkpoint lies above or below the mean of its run's checkpoints, in the task's "
        "standard deviations, so that up is always better (the sign of bits per byte is turned) and all tasks have "
        f"one scale. Smoothed: a centred moving average of {SMOOTHING} checkpoints, of fewer at the ends. The dotted "
        "line is the checkpoint where the mean over the tasks is highest. A task counts there by the share of its "
        "variance that is not the standard error of its scores. Bands: ± one standard error over the items of a task."
    )
    log_x = any(map(_log_axis, runs))
    for run in runs:
        # A line for each task around the mean of all its checkpoints; the best checkpoint is marked.
        lines = {task: (run.amounts, values) for task, values in run.smoothed.items()}
        if len(lines) > 1:
            lines[MEAN] = (run.amounts, run.mean)
        of = MEAN if len(lines) > 1 else next(iter(lines))
        band = {of: run.mean_errors} if any(run.mean_errors) else {}
        title = f"{run.run}: deviation from the task mean"
        best = (run.amounts[run.best], f"best: {run.names[run.best]}")
        levels = {"task mean": 0.0}
        chart = Lines(lines, _label(run), DEVIATION, title, levels, log_x=_log_axis(run), mark=best, errors=band)
        name = re.sub(r"[^\w.-]+", "-", run.run).strip("-.") or "run"
        report.chart(chart, f"`{run.run}`", name=f"deviation-{name}")
    report.heading("Scores")
    for task, about in evaluation.tasks.items():
        lines = {run.run: (run.amounts, run.scores[task]) for run in runs}
        result = evaluation.models[0].tasks[task]
        levels = {} if result.chance is None else {"by chance": result.chance}
        errors = {run.run: run.errors[task] for run in runs if any(run.errors[task])}
        chart = Lines(lines, _label(runs[0]), result.metric, task, levels, log_x=log_x, errors=errors)
        report.chart(chart, f"`{task}`: {sentence(about['description'])}", name=f"score-{task}")
    report.heading("Numbers")
    for run in runs:
        _add_tables(report, run, evaluation)
    for line in explanations(evaluation):
        report.text(line)
    if evaluation.over_runs:
        report.table(run_table(evaluation))
    return add_method(report, evaluation)


def _key_figures(run: Dynamics, evaluation: Evaluation) -> dict[str, str]:
    best = evaluation.runs[run.run][run.best]
    facts = {"best checkpoint": run.names[run.best]}
    if len(best.tasks) <= TASKS_PER_TABLE:  # more are easier to read in the tables below
        facts |= {task: result.shown.split(" ±")[0] for task, result in best.tasks.items()}
    return facts | {f"{task} of the run": one.shown for task, one in evaluation.over_runs.get(run.run, {}).items()}


def _add_comparison(report: Report, runs: list[Dynamics]) -> None:
    """All runs on one scale: the mean over the tasks of the deviation from the mean of all runs."""
    report.heading("The runs compared").text(
        "One scale for all: for each task the deviation from the mean over the checkpoints of all runs, in its "
        "standard deviations, then the mean over the tasks. A line above another is the better run at that point."
    )
    lines, title = {r.run: (r.amounts, r.mean) for r in runs}, "All tasks: deviation from the mean of all runs"
    log_x = any(map(_log_axis, runs))
    errors: dict[str, Sequence[float | None]] = {run.run: run.mean_errors for run in runs if any(run.mean_errors)}
    chart = Lines(lines, _label(runs[0]), DEVIATION, title, {"mean of all": 0.0}, log_x=log_x, errors=errors)
    best = max(runs, key=lambda run: run.mean[run.best])
    report.chart(chart, f"Highest: `{best.run}` at `{best.names[best.best]}`.", name="comparison")


def _label(run: Dynamics) -> str:
    return "checkpoint" if run.unit == "checkpoint" else f"training {run.unit}"


def _log_axis(run: Dynamics) -> bool:
    return run.amounts[0] > 0 and run.amounts[-1] / run.amounts[0] > LOG_AXIS_RATIO


def _add_tables(report: Report, run: Dynamics, evaluation: Evaluation) -> None:
    """Scores, a few tasks at a time, then averages over the tasks."""
    tasks, checkpoints = list(run.scores), evaluation.runs[run.run]
    for start in range(0, len(tasks), TASKS_PER_TABLE):
        group = tasks[start : start + TASKS_PER_TABLE]
        body = [[score_cell(evaluation, model, task) for task in group] for model in checkpoints]
        chances = [checkpoints[0].tasks[task].chance for task in group]
        baselines = ["–" if chance is None else f"{chance:.2f}" for chance in chances]
        report.table(_checkpoint_table(run, group, body, baselines))
    means = {label: scores for label, _, scores in averages(evaluation) if checkpoints[0].name in scores}
    body = [
        [*(f"{scores[model.name]:.2f}" for scores in means.values()), f"{mean:+.2f}".replace("-", "−")]
        for model, mean in zip(checkpoints, run.mean, strict=True)
    ]
    report.table(_checkpoint_table(run, [*means, "mean deviation"], body))


def _checkpoint_table(run: Dynamics, columns: list[str], body: list[list[str]], baselines: Sequence[str] = ()) -> Table:
    """A row for each checkpoint of a run, and the baselines below them."""
    units = [] if run.unit == "checkpoint" else [run.unit]
    each = zip(run.names, run.amounts, body, strict=True)
    rows = [[name, *(f"{amount:,.0f}" for _ in units), *cells] for name, amount, cells in each]
    if set(baselines) - {"–"}:
        rows.append(["baseline", *("" for _ in units), *baselines])
    return Table(["checkpoint", *units, *columns], rows, f"`{run.run}`. In colour the best checkpoint.", best=run.best)
