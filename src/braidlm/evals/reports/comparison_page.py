"""The page that compares models: results.html."""

import math
from collections.abc import Sequence

from braidlm.core.report.page import Page
from braidlm.evals.reports.tables import (
    FEW_PARTS,
    SHORT,
    breakdowns,
    columns,
    explanations,
    rows,
    task_table,
    versions_line,
)
from braidlm.evals.results import Evaluation

MAX_PARTS = 12
"""The largest number of parts for which a task has a table; others are in the files only."""


def comparison_page(evaluation: Evaluation) -> Page:
    """The table, differences between models, parts of tasks, then tasks, models and versions."""
    names = [model.name for model in evaluation.models]
    tasks = f"{len(evaluation.tasks)} task{'s' if len(evaluation.tasks) > 1 else ''}"
    page = Page("Scores", f"{', '.join(names)} on {tasks}")
    page.table(columns(evaluation), rows(evaluation))
    for line in explanations(evaluation):
        page.text(line)
    _differences(page, evaluation)
    for task, kind, heading, body in breakdowns(evaluation):
        page.heading(f"`{task}` by {kind}", 3)
        page.table(heading, body, "Percent of the items that are right.")
    for task in evaluation.tasks:
        _parts(page, evaluation, task)
    _provenance(page, evaluation)
    return page


def _differences(page: Page, evaluation: Evaluation) -> None:
    if not evaluation.verdicts:
        return
    page.heading("Differences")
    body = [
        [
            f"`{task}`",
            verdict.best,
            verdict.next,
            *_with_error(verdict.difference, verdict.standard_error),
            "paired" if verdict.paired else "apart",
            "yes" if verdict.clear else "no",
        ]
        for task, verdict in evaluation.verdicts.items()
    ]
    heading = ["task", "best", "next", "difference", "standard error", "items", "clear"]
    page.table(
        heading,
        body,
        "Clear: more than two standard errors of the difference. Paired: the error is that of the differences item by "
        "item; apart: both scores' errors in quadrature.",
    )


def _with_error(difference: float, error: float | None) -> tuple[str, str]:
    """Both rounded to two significant digits of the error."""
    if not error:  # the difference of equal sums is a rounding error
        return f"{round(difference, 9):.4g}", "–" if error is None else "0"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{difference:.{digits}f}", f"{error:.{digits}f}"


def _parts(page: Page, evaluation: Evaluation, task: str) -> None:
    results = [model.tasks[task] for model in evaluation.models]
    also = {name: [result.also.get(name) for result in results] for name in results[0].also}
    if also:
        page.heading(f"`{task}` by other measures", 3)
        page.table(
            ["measure", *(model.name for model in evaluation.models)],
            [[name, *_formatted(row)] for name, row in also.items()],
        )
    parts = results[0].parts
    if FEW_PARTS < len(parts) <= MAX_PARTS:  # few stand in the first table
        page.heading(f"Parts of `{task}`", 3)
        scores = {
            name: [result.parts[name].score if name in result.parts else None for result in results] for name in parts
        }
        cells = iter(_formatted([score for row in scores.values() for score in row]))
        body = [[name, f"{part.count:,}", *(next(cells) for _ in results)] for name, part in parts.items()]
        page.table(["part", "items", *(model.name for model in evaluation.models)], body)


def _formatted(numbers: Sequence[float | None]) -> list[str]:
    """Numbers with as many decimals as suit the largest of them."""
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    digits = 0 if largest >= 10_000 else 2 if largest >= 10 else 4
    return ["–" if number is None else f"{number:,.{digits}f}" for number in numbers]


def _listed(names: Sequence[str] | None, otherwise: str) -> str:
    return otherwise if names is None else ", ".join(names)


def _provenance(page: Page, evaluation: Evaluation) -> None:
    page.heading("What was measured")
    page.table(*task_table(evaluation))
    models = [
        [model.name, _listed(model.paths, "all"), _listed(model.without, "none"), f"`{model.sha256[:SHORT]}`"]
        for model in evaluation.models
    ]
    page.table(["model", "active paths", "modules switched off", "SHA-256 begins with"], models)
    page.text(f"Computed in {evaluation.dtype}, with {versions_line(evaluation)}.")
    page.text("Every part of every task is in `results.json` and `results.csv` beside this page.")
