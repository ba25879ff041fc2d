"""Learning dynamics as a page to read: dynamics.html."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from braidlm.core import figures
from braidlm.core.page import Page
from braidlm.evals.dynamics import SMOOTHING, Dynamics, compared, run_dynamics
from braidlm.evals.pictures import file_name
from braidlm.evals.results import Evaluation
from braidlm.evals.tables import run_columns, run_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def dynamics_page(found: Evaluation, drawn: Mapping[str, "Figure"]) -> Page:
    """The whole page: what came out best, how each run went, then the numbers."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in found.runs.items()]
    page = Page("Learning dynamics", f"Every checkpoint of {_listed([run.run for run in runs])} on every task")
    if len(runs) == 1:
        page.facts(_key_figures(runs[0], found))
    for run in runs:
        page.text(best_sentence(run))
    if len(runs) > 1:
        page.heading("The runs compared")
        page.text(
            "One scale for all: for each task the deviation from the mean over the checkpoints of all runs, in its "
            "standard deviations, then the mean over the tasks. A line above another is the better run at that point."
        )
        page.figure(figures.to_svg(drawn["comparison"]), _comparison_caption(found))
    page.heading("Around the mean")
    page.text(
        "For each task how far a checkpoint lies above or below the mean of its run's checkpoints, in the task's "
        "standard deviations, so that up is always better (the sign of bits per byte is turned) and all tasks have "
        f"one scale. Smoothed: a centred moving average of {SMOOTHING} checkpoints, of fewer at the ends. The dotted "
        "line is the checkpoint where the mean over the tasks is highest."
    )
    for run in runs:
        page.figure(figures.to_svg(drawn[f"deviation-{file_name(run.run)}"]), f"`{run.run}`")
    page.heading("Scores")
    for task, facts in found.tasks.items():
        page.figure(figures.to_svg(drawn[f"score-{task}"]), f"`{task}`: {facts['description']}.")
    page.heading("Numbers")
    for run in runs:
        _table(page, run, found)
    if found.over_runs:
        page.table(run_columns(found), run_rows(found), "What only all checkpoints of a run together have.")
    _method(page, found)
    return page


def best_sentence(run: Dynamics) -> str:
    """Which checkpoint is best, in words."""
    at = run.best
    over = f"{len(run.names)} checkpoints and {len(run.scores)} task{'s' if len(run.scores) > 1 else ''}"
    scores = ", ".join(f"{task} {values[at]:.4g}" for task, values in run.scores.items())
    where = f" ({run.amounts[at]:,.0f} {run.unit})" if run.unit != "checkpoint" else ""
    return f"`{run.run}`: the best of {over} is `{run.names[at]}`{where}: {scores}." + _caution(run)


def _caution(run: Dynamics) -> str:
    """That some of it is chance, where it is."""
    return "".join(
        f" Mind that `{task}` moves by {spread:.2g} (standard deviation over the checkpoints), and one score has a "
        f"standard error of {error:.2g}: much of its line is chance."
        for task, (spread, error) in run.noisy.items()
    )


def _key_figures(run: Dynamics, found: Evaluation) -> dict[str, str]:
    best = found.runs[run.run][run.best]
    facts = {"best checkpoint": run.names[run.best]}
    return facts | {task: result.shown for task, result in best.tasks.items()}


def _comparison_caption(found: Evaluation) -> str:
    runs = compared(found.runs)
    best = max(runs, key=lambda run: run.mean[run.best])
    return f"Highest: `{best.run}` at `{best.names[best.best]}`."


def _table(page: Page, run: Dynamics, found: Evaluation) -> None:
    columns = ["checkpoint", run.unit, *run.scores, "mean deviation"] if run.unit != "checkpoint" else None
    columns = columns or ["checkpoint", *run.scores, "mean deviation"]
    mean = run.mean
    rows = [
        [
            run.names[at],
            *([f"{run.amounts[at]:,.0f}"] if run.unit != "checkpoint" else []),
            *(model.tasks[task].shown for task in run.scores),
            f"{mean[at]:+.2f}".replace("-", "−"),
        ]
        for at, model in enumerate(found.runs[run.run])
    ]
    page.table(columns, rows, f"`{run.run}`; ± is one standard error.", best=run.best)


def _method(page: Page, found: Evaluation) -> None:
    page.heading("What was measured")
    rows = [
        [f"`{name}`", facts["metric"], facts["count"], facts["licence"], f"`{facts['sha256'][:12]}`"]
        for name, facts in found.tasks.items()
    ]
    page.table(["task", "metric", "items", "licence", "data"], rows)
    page.text(f"Computed in {found.dtype}. All numbers are in `results.json` and `results.csv` beside this page.")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
