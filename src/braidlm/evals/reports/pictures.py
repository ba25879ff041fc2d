"""Learning dynamics as pictures: scores over training, deviations from the mean, and runs side by side."""

import re
import textwrap
from typing import TYPE_CHECKING

from braidlm.core.report import figures
from braidlm.evals.reports.dynamics import Dynamics, compared, run_dynamics
from braidlm.evals.reports.results import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 20
"""Checkpoints whose amounts differ by more than this stand on a logarithmic axis: 1M to 100M words."""
LABEL = 36
"""Characters of an axis's label beside a figure; longer ones are broken."""
DEVIATION = "standard deviations, smoothed"


def pictures(found: Evaluation) -> dict[str, "Figure"]:
    """Figures by the names of their files."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in found.runs.items()]
    drawn = {f"deviation-{file_name(run.run)}": deviation_figure(run) for run in runs}
    drawn |= {f"score-{task}": score_figure(found, runs, task) for task in found.tasks}
    if len(runs) > 1:
        drawn["comparison"] = comparison_figure(compared(found.runs))
    return drawn


def deviation_figure(run: Dynamics) -> "Figure":
    """A line for each task around the mean of all its checkpoints; the best checkpoint is marked."""
    lines = {task: (run.amounts, values) for task, values in run.smoothed.items()}
    if len(lines) > 1:
        lines["mean of the tasks"] = (run.amounts, run.mean)
    title = f"{run.run}: deviation from the task mean"
    figure = figures.line_chart(lines, _label(run), DEVIATION, title, {"task mean": 0.0}, log_x=_wide(run))
    axes, best = figure.axes[0], run.amounts[run.best]
    axes.axvline(best, color=figures.INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.8)
    late = 2 * run.best >= len(run.names)
    axes.annotate(
        f"best: {run.names[run.best]}",
        (best, 0.02),
        (-5 if late else 5, 0),
        ("data", "axes fraction"),
        "offset points",
        color=figures.INK,
        ha="right" if late else "left",
        fontsize=8.5,
    )
    return figure


def score_figure(found: Evaluation, runs: list[Dynamics], task: str) -> "Figure":
    """The score itself over training, a line for each run."""
    lines = {run.run: (run.amounts, run.scores[task]) for run in runs}
    chance = found.models[0].tasks[task].chance
    levels = None if chance is None else {"by chance": chance}
    metric = textwrap.fill(found.models[0].tasks[task].metric, LABEL)
    return figures.line_chart(lines, _label(runs[0]), metric, task, levels, log_x=any(map(_wide, runs)))


def comparison_figure(runs: list[Dynamics]) -> "Figure":
    """All runs on one scale: the mean over the tasks of the deviation from the mean of all runs."""
    lines = {run.run: (run.amounts, run.mean) for run in runs}
    title = "All tasks: deviation from the mean of all runs"
    log = any(map(_wide, runs))
    return figures.line_chart(lines, _label(runs[0]), DEVIATION, title, {"mean of all": 0.0}, log_x=log)


def file_name(name: str) -> str:
    """A run's name as a file may have it."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _label(run: Dynamics) -> str:
    return "checkpoint" if run.unit == "checkpoint" else f"training {run.unit}"


def _wide(run: Dynamics) -> bool:
    return run.amounts[0] > 0 and run.amounts[-1] / run.amounts[0] > WIDE
