"""Results as tables: columns and rows for the terminal, Markdown and pages, and one long file for programs.

Models that are compared stand side by side, a task in each row; the checkpoints of runs are many, and stand below each
other. A cell that is `Strong` is the best of its task by more than the noise (`verdicts.py`).
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from braidlm.core.report.page import Strong
from braidlm.evals.reports.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.scoring.windows import IN_WINDOWS, SHORTENED
from braidlm.evals.statistics.averages import Average, averages

AMOUNTS = ("words", "tokens", "steps")
FIXED = 3
"""Columns before those of the models: task, items, baseline."""
CSV_COLUMNS = (
    "task",
    "part",
    "measure",
    "score",
    "standard_error",
    "count",
    "baseline",
    "clearly_best",
    "version",
    "data_sha256",
    "model_sha256",
)
MARKED = (
    "the best by more than two standard errors of its difference from the next (item by item where the task's items "
    "allow, else of both scores' errors in quadrature)"
)
BASELINE = "baseline: what guessing gives, or always giving the most frequent answer"
SHORT = 12
"""Characters of a hash that are enough to tell it from others."""


def columns(found: Evaluation) -> list[str]:
    """The heading of the table of models and tasks."""
    if not found.runs:
        return ["task", "items", "baseline", *(model.name for model in found.models)]
    tasks = (f"{name} ({facts['count']:,})" for name, facts in found.tasks.items())
    return ["model", *_amounts(found), *tasks, *(average.label for average in averages(found))]


def rows(found: Evaluation) -> Iterator[list[str]]:
    """Scores with standard errors, what guessing gives, where that is known, and averages, where a suite has some."""
    yield from _checkpoint_rows(found) if found.runs else _task_rows(found)


def run_columns(found: Evaluation) -> list[str]:
    """The heading of the table of scores that only whole runs have."""
    return ["run", *next(iter(found.over_runs.values()), {})]


def run_rows(found: Evaluation) -> Iterator[list[str]]:
    """A row for each run."""
    for run, results in found.over_runs.items():
        yield [run, *(result.shown for result in results.values())]


def score_cell(found: Evaluation, model: ModelResults, task: str) -> str:
    """A score with its standard error; `Strong` where it is clearly the best."""
    shown = model.tasks[task].shown
    return Strong(shown) if _is_best(found, model, task) else shown


def breakdowns(found: Evaluation) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Task, by what its items are sorted, and a table of that, where models stand side by side."""
    for task in found.tasks if not found.runs else ():
        for kind, groups in found.models[0].tasks[task].by.items():
            heading = [kind, "items", *(model.name for model in found.models)]
            each = [[_part(model.tasks[task], kind, name) for model in found.models] for name in groups]
            yield (
                task,
                kind,
                heading,
                [[name, f"{part.count:,}", *cells] for (name, part), cells in zip(groups.items(), each, strict=True)],
            )


def markdown(found: Evaluation) -> str:
    """The table, and under it what was measured, on what and with what."""
    lines = _table(columns(found), list(rows(found)))
    if found.over_runs:
        lines += ["", "Over all checkpoints of a run:", "", *_table(run_columns(found), list(run_rows(found)))]
    lines += ["", *explanations(found), ""]
    lines += [f"- `{name}`: {task_line(facts)}" for name, facts in found.tasks.items()]
    lines += ["", *(f"- `{model.name}`: {model_line(model)}" for model in found.models)]
    lines += ["", f"Computed in {found.dtype}, with {versions_line(found)}."]
    for task, kind, heading, body in breakdowns(found):
        lines += ["", f"`{task}` by {kind}, in percent of the items:", "", *_table(heading, body)]
    return "\n".join(lines) + "\n"


def explanations(found: Evaluation) -> list[str]:
    """What a reader of the table has to know."""
    said = ["± is one standard error" + (f"; {BASELINE}" if any(_chances(found)) else "") + "."]
    if any(verdict.clear for verdict in found.verdicts.values()):
        said.append(f"Bold: {MARKED}.")
    said += [f"{average.label}: {average.note}." for average in averages(found)]
    return said + [f"{line}." for line in too_long_lines(found)]


def too_long_lines(found: Evaluation) -> list[str]:
    """Of which tasks some items were longer than a model reads, and what was done about them."""
    lines = []
    for task, facts in found.tasks.items():
        seen: dict[tuple[int, int], list[str]] = {}
        for model in found.models:
            notes = model.tasks[task].notes
            counts = (notes.get(SHORTENED, 0), notes.get(IN_WINDOWS, 0))
            seen.setdefault(counts, []).append(model.name)
        for (shortened, in_windows), models in seen.items():
            ways = (f"{shortened:,} read without their beginning", f"{in_windows:,} scored in windows")
            done = ", ".join(way for way, count in zip(ways, (shortened, in_windows), strict=True) if count)
            if done:
                who = "" if len(seen) == 1 else f" ({', '.join(models)})"
                lines.append(f"{task}: of {facts['count']:,} items some are longer than the context: {done}{who}")
    return lines


def task_line(facts: dict[str, Any]) -> str:
    """What a task is, in a sentence."""
    settings = ", ".join(f"{name} {value}" for name, value in facts.get("settings", {}).items() if value is not None)
    with_settings = f" with {settings}" if settings else ""
    return (
        f"{sentence(facts['description'])} Score: {facts['metric']}{with_settings}; {facts['count']:,} items; version "
        f"{facts['version']}; licence: {facts['licence']}; SHA-256 of the data {facts['sha256'][:SHORT]}."
    )


def sentence(text: str) -> str:
    """With a full stop, unless it asks."""
    return text if text[-1] in ".?!" else f"{text}."


def task_table(found: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of what was measured."""
    return ["task", "what it is"], [[f"`{name}`", task_line(facts)] for name, facts in found.tasks.items()]


def model_line(model: ModelResults) -> str:
    """Which model it was."""
    heard = "" if model.paths is None else f", heard: {', '.join(model.paths)}"
    return f"{model.sha256[:SHORT]}{heard}"


def versions_line(found: Evaluation) -> str:
    """What computed it."""
    return ", ".join(f"{package} {version}" for package, version in found.versions.items())


def long_csv(found: Evaluation) -> str:
    """A row for each model, task and part of it, the whole task first; then other measures, and scores of runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "run", *AMOUNTS, *CSV_COLUMNS])
    for model in found.models:
        known = [model.name, model.run, *(getattr(model, unit) for unit in AMOUNTS)]
        for name, result in model.tasks.items():
            about = [found.tasks[name]["version"], found.tasks[name]["sha256"], model.sha256]
            best = _is_best(found, model, name)
            writer.writerows([*known, *line, *about] for line in _csv_lines(name, result, best))
    for run, results in found.over_runs.items():
        for name, result in results.items():
            about = [found.tasks[name]["version"], found.tasks[name]["sha256"], ""]
            lines = _csv_lines(name, result, False)
            writer.writerows(["", run, *("" for _ in AMOUNTS), *line, *about] for line in lines)
    return text.getvalue()


def _csv_lines(task: str, result: TaskResult, best: bool) -> Iterator[list[Any]]:
    """Up to the column of the verdict."""
    error = "" if result.standard_error is None else f"{result.standard_error:.6g}"
    chance = "" if result.chance is None else f"{result.chance:.6g}"
    measure = result.metric
    yield [task, "all", measure, f"{result.score:.8g}", error, result.count, chance, "yes" if best else ""]
    for name, one in result.parts.items():
        yield [task, name, measure, f"{one.score:.8g}", "", one.count, "", ""]
    for kind, groups in result.by.items():
        for name, one in groups.items():
            yield [task, f"{kind}: {name}", measure, f"{one.score:.8g}", "", one.count, "", ""]
    for name, score in result.also.items():
        yield [task, "all", name, f"{score:.8g}", "", result.count, "", ""]


def _task_rows(found: Evaluation) -> Iterator[list[str]]:
    for (task, facts), chance in zip(found.tasks.items(), _chances(found), strict=True):
        yield [task, f"{facts['count']:,}", chance or "-", *(score_cell(found, model, task) for model in found.models)]
    for average in averages(found):
        yield [average.label, "", "", *(_average(average, model) for model in found.models)]


def _checkpoint_rows(found: Evaluation) -> Iterator[list[str]]:
    amounts = _amounts(found)
    means = averages(found)
    for model in found.models:
        trained = (f"{getattr(model, unit):,}" for unit in amounts)
        scores = (score_cell(found, model, task) for task in found.tasks)
        yield [model.name, *trained, *scores, *(_average(average, model) for average in means)]
    if any(_chances(found)):
        shown = (chance or "-" for chance in _chances(found))
        yield ["baseline", *("" for _ in amounts), *shown, *("" for _ in means)]


def _chances(found: Evaluation) -> list[str]:
    """What guessing gives for each task; empty where that is not known."""
    chances = [found.models[0].tasks[task].chance for task in found.tasks]
    return ["" if chance is None else f"{chance:.2f}" for chance in chances]


def _is_best(found: Evaluation, model: ModelResults, task: str) -> bool:
    verdict = found.verdicts.get(task)
    return verdict is not None and verdict.clear and verdict.best == model.name


def _average(average: Average, model: ModelResults) -> str:
    return f"{average.scores[model.name]:.2f}" if model.name in average.scores else "-"


def _part(result: TaskResult, kind: str, name: str) -> str:
    part = result.by.get(kind, {}).get(name)
    return "-" if part is None else f"{part.score:.2f}"


def _amounts(found: Evaluation) -> list[str]:
    """For checkpoints, how far they are trained, in the first unit that all know."""
    if not found.runs:
        return []
    return [unit for unit in AMOUNTS if all(getattr(model, unit) for model in found.models)][:1]


def _table(heading: Sequence[str], body: Sequence[Sequence[Any]]) -> list[str]:
    return [_line(heading), "|" + " --- |" * len(heading), *(_line(row) for row in body)]


def _line(cells: Sequence[Any]) -> str:
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    shown = (f"**{text}**" if isinstance(cell, Strong) else text for cell, text in zip(cells, escaped, strict=True))
    return "| " + " | ".join(shown) + " |"
