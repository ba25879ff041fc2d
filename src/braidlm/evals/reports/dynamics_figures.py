"""Figures of learning dynamics: scores over training, deviations from the mean, and runs side by side."""

import re
import textwrap
from typing import TYPE_CHECKING

from braidlm.core.report import figures
from braidlm.core.report.figure_style import INK
from braidlm.evals.reports.dynamics import Dynamics, compare_runs, run_dynamics
from braidlm.evals.results import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG_AXIS_RATIO = 20
"""Amounts of training that differ by more than this factor have a logarithmic axis: 1M to 100M words."""
MAX_LABEL = 36
"""Characters of an axis label; longer ones are wrapped."""
DEVIATION = "standard deviations, smoothed"


def dynamics_figures(evaluation: Evaluation) -> dict[str, "Figure"]:
    """Figures by the names of their files."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in evaluation.runs.items()]
    drawn = {f"deviation-{file_name(run.run)}": deviation_figure(run) for run in runs}
    drawn |= {f"score-{task}": score_figure(evaluation, runs, task) for task in evaluation.tasks}
    if len(runs) > 1:
        drawn["comparison"] = comparison_figure(compare_runs(evaluation.runs))
    return drawn


def deviation_figure(run: Dynamics) -> "Figure":
    """A line for each task around the mean of all its checkpoints; the best checkpoint is marked."""
    lines = {task: (run.amounts, values) for task, values in run.smoothed.items()}
    if len(lines) > 1:
        lines["mean of the tasks"] = (run.amounts, run.mean)
    title = f"{run.run}: deviation from the task mean"
    figure = figures.line_chart(lines, _label(run), DEVIATION, title, {"task mean": 0.0}, log_x=_log_axis(run))
    axes, best = figure.axes[0], run.amounts[run.best]
    axes.axvline(best, color=INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.8)
    late = 2 * run.best >= len(run.names)
    axes.annotate(
        f"best: {run.names[run.best]}",
        (best, 0.02),
        (-5 if late else 5, 0),
        ("data", "axes fraction"),
        "offset points",
        color=INK,
        ha="right" if late else "left",
        fontsize=8.5,
    )
    return figure


def score_figure(evaluation: Evaluation, runs: list[Dynamics], task: str) -> "Figure":
    """The score itself over training, a line for each run."""
    lines = {run.run: (run.amounts, run.scores[task]) for run in runs}
    chance = evaluation.models[0].tasks[task].chance
    levels = None if chance is None else {"by chance": chance}
    metric = textwrap.fill(evaluation.models[0].tasks[task].metric, MAX_LABEL)
    return figures.line_chart(lines, _label(runs[0]), metric, task, levels, log_x=any(map(_log_axis, runs)))


def comparison_figure(runs: list[Dynamics]) -> "Figure":
    """All runs on one scale: the mean over the tasks of the deviation from the mean of all runs."""
    lines = {run.run: (run.amounts, run.mean) for run in runs}
    title = "All tasks: deviation from the mean of all runs"
    log = any(map(_log_axis, runs))
    return figures.line_chart(lines, _label(runs[0]), DEVIATION, title, {"mean of all": 0.0}, log_x=log)


def file_name(name: str) -> str:
    """A run's name as a file name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _label(run: Dynamics) -> str:
    return "checkpoint" if run.unit == "checkpoint" else f"training {run.unit}"


def _log_axis(run: Dynamics) -> bool:
    return run.amounts[0] > 0 and run.amounts[-1] / run.amounts[0] > LOG_AXIS_RATIO
