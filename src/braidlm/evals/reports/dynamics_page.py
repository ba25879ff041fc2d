"""The page of learning dynamics: dynamics.html."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from braidlm.core.report import figures
from braidlm.core.report.page import Page
from braidlm.evals.babylm.averages import averages
from braidlm.evals.reports.dynamics import SMOOTHING, Dynamics, compare_runs, run_dynamics
from braidlm.evals.reports.dynamics_figures import file_name
from braidlm.evals.reports.tables import (
    SHORT,
    explanations,
    run_columns,
    run_rows,
    score_cell,
    sentence,
    task_table,
    versions_line,
)
from braidlm.evals.results import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS_PER_TABLE = 3


def dynamics_page(evaluation: Evaluation, drawn: Mapping[str, "Figure"]) -> Page:
    """The best checkpoints, the figures of each run, then the numbers."""
    runs = [run_dynamics(name, checkpoints) for name, checkpoints in evaluation.runs.items()]
    page = Page("Learning dynamics", f"Every checkpoint of {_listed([run.run for run in runs])} on every task")
    if len(runs) == 1:
        page.facts(_key_figures(runs[0], evaluation))
    for run in runs:
        page.text(best_sentence(run))
    if len(runs) > 1:
        page.heading("The runs compared")
        page.text(
            "One scale for all: for each task the deviation from the mean over the checkpoints of all runs, in its "
            "standard deviations, then the mean over the tasks. A line above another is the better run at that point."
        )
        page.figure(figures.to_svg(drawn["comparison"]), _comparison_caption(evaluation))
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
    for task, facts in evaluation.tasks.items():
        page.figure(figures.to_svg(drawn[f"score-{task}"]), f"`{task}`: {sentence(facts['description'])}")
    page.heading("Numbers")
    for run in runs:
        _table(page, run, evaluation)
    for line in explanations(evaluation):
        page.text(line)
    if evaluation.over_runs:
        page.table(run_columns(evaluation), run_rows(evaluation), "What only all checkpoints of a run together have.")
    _method(page, evaluation)
    return page


def best_sentence(run: Dynamics) -> str:
    """Which checkpoint is best, in words."""
    at = run.best
    over = f"{len(run.names)} checkpoints and {len(run.scores)} task{'s' if len(run.scores) > 1 else ''}"
    scores = ", ".join(f"{task} {values[at]:.4g}" for task, values in run.scores.items())
    where = f" ({run.amounts[at]:,.0f} {run.unit})" if run.unit != "checkpoint" else ""
    return f"`{run.run}`: the best of {over} is `{run.names[at]}`{where}: {scores}." + _caution(run)


def _caution(run: Dynamics) -> str:
    """A note on tasks whose differences between checkpoints are within the noise."""
    if not run.noisy:
        return ""
    tasks = ", ".join(f"`{task}` ({spread:.2g} and {error:.2g})" for task, (spread, error) in run.noisy.items())
    return (
        f" Mind that much is chance where the standard deviation over the checkpoints is not much more than the "
        f"standard error of one score: {tasks}."
    )


def _key_figures(run: Dynamics, evaluation: Evaluation) -> dict[str, str]:
    best = evaluation.runs[run.run][run.best]
    facts = {"best checkpoint": run.names[run.best]}
    if len(best.tasks) <= TASKS_PER_TABLE:  # more are easier to read in the tables below
        facts |= {task: result.shown.split(" ±")[0] for task, result in best.tasks.items()}
    return facts | {f"{task} of the run": one.shown for task, one in evaluation.over_runs.get(run.run, {}).items()}


def _comparison_caption(evaluation: Evaluation) -> str:
    runs = compare_runs(evaluation.runs)
    best = max(runs, key=lambda run: run.mean[run.best])
    return f"Highest: `{best.run}` at `{best.names[best.best]}`."


def _table(page: Page, run: Dynamics, evaluation: Evaluation) -> None:
    """Scores, a few tasks at a time, then averages over the tasks."""
    tasks = list(run.scores)
    for start in range(0, len(tasks), TASKS_PER_TABLE):
        group = tasks[start : start + TASKS_PER_TABLE]
        body = [[score_cell(evaluation, model, task) for task in group] for model in evaluation.runs[run.run]]
        chances = [evaluation.runs[run.run][0].tasks[task].chance for task in group]
        _checkpoints(page, run, group, body, ["–" if chance is None else f"{chance:.2f}" for chance in chances])
    means = [average for average in averages(evaluation) if evaluation.runs[run.run][0].name in average.scores]
    body = [
        [*(f"{average.scores[model.name]:.2f}" for average in means), f"{mean:+.2f}".replace("-", "−")]
        for model, mean in zip(evaluation.runs[run.run], run.mean, strict=True)
    ]
    _checkpoints(page, run, [*(average.label for average in means), "mean deviation"], body)


def _checkpoints(
    page: Page, run: Dynamics, columns: list[str], body: list[list[str]], baselines: Sequence[str] = ()
) -> None:
    """A table with a row for each checkpoint of a run, and the baselines below them."""
    counts = run.unit != "checkpoint"
    heads = [
        [name, f"{amount:,.0f}"] if counts else [name] for name, amount in zip(run.names, run.amounts, strict=True)
    ]
    rows = [[*head, *cells] for head, cells in zip(heads, body, strict=True)]
    if set(baselines) - {"–"}:
        rows.append(["baseline", *([""] if counts else []), *baselines])
    heading = ["checkpoint", *([run.unit] if counts else []), *columns]
    page.table(heading, rows, f"`{run.run}`. In colour the best checkpoint.", best=run.best)


def _method(page: Page, evaluation: Evaluation) -> None:
    page.heading("What was measured")
    page.table(*task_table(evaluation))
    models = [[model.name, f"`{model.sha256[:SHORT]}`"] for model in evaluation.models]
    page.table(["checkpoint", "SHA-256 begins with"], models)
    page.text(
        f"Computed in {evaluation.dtype}, with {versions_line(evaluation)}. All numbers are in `results.json` "
        "and `results.csv` beside this page."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
