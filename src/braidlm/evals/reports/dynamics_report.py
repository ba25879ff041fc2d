"""The report of learning dynamics: dynamics.html, dynamics.json, and charts of scores over training."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from braidlm.core.report.report import Lines, Report, Table, listed
from braidlm.evals.babylm.averages import averages
from braidlm.evals.reports.dynamics import SMOOTHING, Dynamics, best_sentence, compare_runs, run_dynamics
from braidlm.evals.reports.scores import (
    SHORT,
    explanations,
    run_table,
    score_cell,
    sentence,
    task_table,
    versions_line,
)
from braidlm.evals.results import Evaluation

TASKS_PER_TABLE = 3
LOG_AXIS_RATIO = 20
"""Amounts of training that differ by more than this factor have a logarithmic axis: 1M to 100M words."""
MAX_LABEL = 36
"""Characters of an axis label; longer ones are wrapped."""
DEVIATION = "standard deviations, smoothed"


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
        _add_comparison(report, compare_runs(evaluation.runs))
    report.heading("Around the mean")
    report.text(
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
        title, best = (
            f"{run.run}: deviation from the task mean",
            (run.amounts[run.best], f"best: {run.names[run.best]}"),
        )
        levels = {"task mean": 0.0}
        chart = Lines(lines, _label(run), DEVIATION, title, levels, log_x=_log_axis(run), mark=best)
        name = re.sub(r"[^\w.-]+", "-", run.run).strip("-.") or "run"
        report.chart(chart, f"`{run.run}`", name=f"deviation-{name}")
    report.heading("Scores")
    for task, about in evaluation.tasks.items():
        lines = {run.run: (run.amounts, run.scores[task]) for run in runs}
        result = evaluation.models[0].tasks[task]
        levels = {} if result.chance is None else {"by chance": result.chance}
        chart = Lines(lines, _label(runs[0]), textwrap.fill(result.metric, MAX_LABEL), task, levels, log_x=log_x)
        report.chart(chart, f"`{task}`: {sentence(about['description'])}", name=f"score-{task}")
    report.heading("Numbers")
    for run in runs:
        _add_tables(report, run, evaluation)
    for line in explanations(evaluation):
        report.text(line)
    if evaluation.over_runs:
        report.table(run_table(evaluation))
    report.heading("What was measured").table(task_table(evaluation))
    models = [[model.name, f"`{model.sha256[:SHORT]}`"] for model in evaluation.models]
    report.table(Table(["checkpoint", "SHA-256 begins with"], models))
    return report.text(
        f"Computed in {evaluation.dtype}, with {versions_line(evaluation)}. All numbers are in `results.json` "
        "and `results.csv` beside this page."
    )


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
    chart = Lines(
        {run.run: (run.amounts, run.mean) for run in runs},
        _label(runs[0]),
        DEVIATION,
        "All tasks: deviation from the mean of all runs",
        {"mean of all": 0.0},
        log_x=any(map(_log_axis, runs)),
    )
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
    means = [average for average in averages(evaluation) if checkpoints[0].name in average.scores]
    body = [
        [*(f"{average.scores[model.name]:.2f}" for average in means), f"{mean:+.2f}".replace("-", "−")]
        for model, mean in zip(checkpoints, run.mean, strict=True)
    ]
    report.table(_checkpoint_table(run, [*(average.label for average in means), "mean deviation"], body))


def _checkpoint_table(run: Dynamics, columns: list[str], body: list[list[str]], baselines: Sequence[str] = ()) -> Table:
    """A row for each checkpoint of a run, and the baselines below them."""
    counts = run.unit != "checkpoint"
    heads = [
        [name, f"{amount:,.0f}"] if counts else [name] for name, amount in zip(run.names, run.amounts, strict=True)
    ]
    rows = [[*head, *cells] for head, cells in zip(heads, body, strict=True)]
    if set(baselines) - {"–"}:
        rows.append(["baseline", *([""] if counts else []), *baselines])
    heading = ["checkpoint", *([run.unit] if counts else []), *columns]
    return Table(heading, rows, f"`{run.run}`. In colour the best checkpoint.", best=run.best)
