"""Learning dynamics: how the scores of a run's checkpoints move around their mean (Figures 3 to 5 of MoEP).

For each task: the deviation of every checkpoint from the task's mean over all checkpoints, in the task's standard
deviations over the checkpoints, so that tasks of different scales have one axis and one weight; where lower is better
(bits per byte) the sign is flipped, so that up is always better. Then smoothed: a centred moving average of three
checkpoints, of two at the ends. The best checkpoint has the highest smoothed deviation on average over the tasks, and
of equal ones the highest deviation. The report is dynamics.html and dynamics.json; the terminal's, of any evaluation,
names the best checkpoint of each run below the scores.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from braidlm.core.report.report import Lines, Report, Table, listed
from braidlm.evals.babylm.averages import averages
from braidlm.evals.reports.scores import AMOUNTS, add_method, explanations, run_table, score_cell, score_table, sentence
from braidlm.evals.results import Evaluation, ModelResults

SMOOTHING = 3
"""The window of the moving average, in checkpoints."""
NOISE = 2.0
"""A task whose checkpoints differ by less than this many standard errors of one score is called noisy."""


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
    unit = next((unit for unit in AMOUNTS if all(getattr(model, unit) for model in checkpoints)), "checkpoint")
    amounts = range(1, len(checkpoints) + 1) if unit == "checkpoint" else [getattr(each, unit) for each in checkpoints]
    names = [model.name.removeprefix(f"{run}/") for model in checkpoints]
    smoothed = {task: smooth(values) for task, values in deviations.items()}
    return Dynamics(run, unit, list(map(float, amounts)), names, scores, deviations, smoothed, noisy)


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
    if at < len(run.names) - 1:
        last = ", ".join(f"{task} {values[-1]:.4g}" for task, values in run.scores.items())
        text += f" The last, `{run.names[-1]}`, has {last}."
    if not run.noisy:
        return text
    tasks = ", ".join(f"`{task}` ({spread:.2g} and {error:.2g})" for task, (spread, error) in run.noisy.items())
    return (
        f"{text}\n\nHow sure: much is chance where the standard deviation over the checkpoints is not much more than "
        f"the standard error of one score: {tasks}."
    )


TASKS_PER_TABLE = 3
LOG_AXIS_RATIO = 20
"""Amounts of training that differ by more than this factor have a logarithmic axis: 1M to 100M words."""
DEVIATION = "standard deviations, smoothed"


def short_report(evaluation: Evaluation) -> Report:
    """The report for the terminal: the table, what it needs to be read, and the best checkpoint of each run."""
    report = Report("Scores").table(score_table(evaluation))
    for line in explanations(evaluation, strong="*"):
        report.text(line)
    if evaluation.over_runs:
        report.table(run_table(evaluation))
    for name, checkpoints in evaluation.runs.items():
        report.text(best_sentence(run_dynamics(name, checkpoints)))
    return report


def dynamics_report(evaluation: Evaluation) -> Report:
    """The best checkpoints, the charts of each run, then the numbers."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in evaluation.runs.items()]
    facts = [{**asdict(run), "mean": run.mean, "best": run.names[run.best]} for run in runs]
    report = Report("Learning dynamics", f"Every checkpoint of {listed([run.run for run in runs])} on every task")
    report.verdict = "\n\n".join(map(best_sentence, runs))
    report.data["dynamics"] = {"format": 1, "runs": facts}
    if len(runs) == 1:
        report.facts(_key_figures(runs[0], evaluation))
    else:
        compared = compare_runs(evaluation.runs)
        (highest, first), (next_highest, second), *_ = sorted(((max(r.mean), r.run) for r in compared), reverse=True)
        report.verdict = (
            f"Of {len(runs)} runs, {first} gets highest: its best checkpoint is {highest:+.2f} standard deviations "
            f"from the mean of all, on average over tasks; {second} gets to {next_highest:+.2f}.\n\n{report.verdict}"
        )
        _add_comparison(report, compared)
    report.heading("Around the mean").text(
        "For each task how far a checkpoint lies above or below the mean of its run's checkpoints, in the task's "
        "standard deviations, so that up is always better (the sign of bits per byte is turned) and all tasks have "
        f"one scale. Smoothed: a centred moving average of {SMOOTHING} checkpoints, of fewer at the ends. The dotted "
        "line is the checkpoint where the mean over the tasks is highest."
    )
    log_x = any(map(_log_axis, runs))
    for run in runs:
        # A line for each task around the mean of all its checkpoints; the best checkpoint is marked.
        lines = {task: (run.amounts, values) for task, values in run.smoothed.items()}
        if len(lines) > 1:
            lines["mean of the tasks"] = (run.amounts, run.mean)
        title = f"{run.run}: deviation from the task mean"
        best = (run.amounts[run.best], f"best: {run.names[run.best]}")
        chart = Lines(lines, _label(run), DEVIATION, title, {"task mean": 0.0}, log_x=_log_axis(run), mark=best)
        name = re.sub(r"[^\w.-]+", "-", run.run).strip("-.") or "run"
        report.chart(chart, f"`{run.run}`", name=f"deviation-{name}")
    report.heading("Scores")
    for task, about in evaluation.tasks.items():
        lines = {run.run: (run.amounts, run.scores[task]) for run in runs}
        result = evaluation.models[0].tasks[task]
        levels = {} if result.chance is None else {"by chance": result.chance}
        chart = Lines(lines, _label(runs[0]), result.metric, task, levels, log_x=log_x)
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
    chart = Lines(lines, _label(runs[0]), DEVIATION, title, {"mean of all": 0.0}, log_x=log_x)
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
    amounts: list[list[str]] = [[] for _ in run.names]
    units = [] if run.unit == "checkpoint" else [run.unit]
    if units:
        amounts = [[f"{amount:,.0f}"] for amount in run.amounts]
    rows = [[name, *amount, *cells] for name, amount, cells in zip(run.names, amounts, body, strict=True)]
    if set(baselines) - {"–"}:
        rows.append(["baseline", *("" for _ in units), *baselines])
    return Table(["checkpoint", *units, *columns], rows, f"`{run.run}`. In colour the best checkpoint.", best=run.best)
