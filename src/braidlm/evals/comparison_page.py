"""Models compared, as a page to read: results.html."""

from braidlm.core.page import Page
from braidlm.evals.results import Evaluation
from braidlm.evals.tables import SHORT, breakdowns, columns, explanations, rows, versions_line

KEYS = ("description", "metric", "count", "licence")
MANY = 12
"""Parts of a task beyond which its table is folded into the files."""


def comparison_page(found: Evaluation) -> Page:
    """The whole page: the table, what stands out in it, parts of tasks, then what was measured and with what."""
    names = [model.name for model in found.models]
    tasks = f"{len(found.tasks)} task{'s' if len(found.tasks) > 1 else ''}"
    page = Page("Scores", f"{', '.join(names)} on {tasks}")
    page.table(columns(found), rows(found))
    page.text(" ".join(explanations(found)))
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
            f"{round(verdict.difference, 9):.4g}",  # what is left of equal sums is no difference
            "–" if verdict.standard_error is None else f"{verdict.standard_error:.2g}",
            "item by item" if verdict.paired else "of both scores",
            "yes" if verdict.clear else "no",
        ]
        for task, verdict in found.verdicts.items()
    ]
    heading = ["task", "best", "next", "difference", "standard error", "error is", "more than noise"]
    page.table(heading, body, "More than noise: more than two standard errors of the difference.")


def _parts(page: Page, found: Evaluation, task: str) -> None:
    results = [model.tasks[task] for model in found.models]
    also = {name: [result.also.get(name) for result in results] for name in results[0].also}
    if also:
        page.heading(f"`{task}` by other measures", 3)
        page.table(["measure", *(model.name for model in found.models)], [[name, *row] for name, row in also.items()])
    parts = results[0].parts
    if 1 < len(parts) <= MANY:
        page.heading(f"Parts of `{task}`", 3)
        body = [
            [name, part.count, *(result.parts[name].score if name in result.parts else None for result in results)]
            for name, part in parts.items()
        ]
        page.table(["part", "items", *(model.name for model in found.models)], body)


def _measured(page: Page, found: Evaluation) -> None:
    page.heading("What was measured")
    body = [
        [f"`{name}`", *(facts[key] for key in KEYS), str(facts["version"]), f"`{facts['sha256'][:SHORT]}`"]
        for name, facts in found.tasks.items()
    ]
    page.table(["task", "what", "metric", "items", "licence", "version", "data"], body)
    models = [
        [model.name, "all" if model.paths is None else ", ".join(model.paths), f"`{model.sha256[:SHORT]}`"]
        for model in found.models
    ]
    page.table(["model", "paths heard", "SHA-256 begins with"], models)
    page.text(f"Computed in {found.dtype}, with {versions_line(found)}.")
    page.text("Every part of every task is in `results.json` and `results.csv` beside this page.")
