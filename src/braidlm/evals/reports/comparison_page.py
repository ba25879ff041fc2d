"""Models compared, as a page to read: results.html."""

import math
from collections.abc import Sequence

from braidlm.core.report.page import Page
from braidlm.evals.reports.results import Evaluation
from braidlm.evals.reports.tables import SHORT, breakdowns, columns, explanations, rows, task_table, versions_line

MANY = 12
"""Parts of a task beyond which its table is folded into the files."""


def comparison_page(found: Evaluation) -> Page:
    """The whole page: the table, what stands out in it, parts of tasks, then what was measured and with what."""
    names = [model.name for model in found.models]
    tasks = f"{len(found.tasks)} task{'s' if len(found.tasks) > 1 else ''}"
    page = Page("Scores", f"{', '.join(names)} on {tasks}")
    page.table(columns(found), rows(found))
    for line in explanations(found):
        page.text(line)
    _standing_out(page, found)
    for task, kind, heading, body in breakdowns(found):
        page.heading(f"`{task}` by {kind}", 3)
        page.table(heading, body, "Percent of the items that are right.")
    for task in found.tasks:
        _parts(page, found, task)
    _measured(page, found)
    return page


def _standing_out(page: Page, found: Evaluation) -> None:
    if not found.verdicts:
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
        for task, verdict in found.verdicts.items()
    ]
    heading = ["task", "best", "next", "difference", "standard error", "items", "clear"]
    page.table(
        heading,
        body,
        "Clear: more than two standard errors of the difference. Paired: the error is that of the differences item by "
        "item; apart: both scores' errors in quadrature.",
    )


def _with_error(difference: float, error: float | None) -> tuple[str, str]:
    """Both to the same digit: two digits of the error, for a difference is not known better."""
    if not error:
        return f"{round(difference, 9):.4g}", "–" if error is None else "0"  # what is left of equal sums is nothing
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{difference:.{digits}f}", f"{error:.{digits}f}"


def _parts(page: Page, found: Evaluation, task: str) -> None:
    results = [model.tasks[task] for model in found.models]
    also = {name: [result.also.get(name) for result in results] for name in results[0].also}
    if also:
        page.heading(f"`{task}` by other measures", 3)
        page.table(
            ["measure", *(model.name for model in found.models)], [[name, *_alike(row)] for name, row in also.items()]
        )
    parts = results[0].parts
    if 1 < len(parts) <= MANY:
        page.heading(f"Parts of `{task}`", 3)
        scores = {
            name: [result.parts[name].score if name in result.parts else None for result in results] for name in parts
        }
        cells = iter(_alike([score for row in scores.values() for score in row]))
        body = [[name, f"{part.count:,}", *(next(cells) for _ in results)] for name, part in parts.items()]
        page.table(["part", "items", *(model.name for model in found.models)], body)


def _alike(numbers: Sequence[float | None]) -> list[str]:
    """Numbers with as many decimals as suit the largest of them."""
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    digits = 0 if largest >= 10_000 else 2 if largest >= 10 else 4
    return ["–" if number is None else f"{number:,.{digits}f}" for number in numbers]


def _measured(page: Page, found: Evaluation) -> None:
    page.heading("What was measured")
    page.table(*task_table(found))
    models = [
        [model.name, "all" if model.paths is None else ", ".join(model.paths), f"`{model.sha256[:SHORT]}`"]
        for model in found.models
    ]
    page.table(["model", "paths heard", "SHA-256 begins with"], models)
    page.text(f"Computed in {found.dtype}, with {versions_line(found)}.")
    page.text("Every part of every task is in `results.json` and `results.csv` beside this page.")
