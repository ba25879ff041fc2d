"""Results as tables: columns and rows for the terminal, Markdown and pages, and one long file for programs.

Models that are compared stand side by side, a task in each row; the checkpoints of runs are many, and stand below each
other. A cell that is `Strong` is significantly the best of its task (`significance.py`).
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from braidlm.core.report.page import Strong
from braidlm.evals.babylm.averages import Average, averages
from braidlm.evals.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.scoring.windows import IN_WINDOWS, SHORTENED

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
FEW_PARTS = 6
"""A task of two to so many parts, such as texts of your own, has a row for each of them."""
SHORT = 12
"""Characters of a hash that are shown."""


def columns(evaluation: Evaluation) -> list[str]:
    """The heading of the table of models and tasks."""
    if not evaluation.runs:
        return ["task", "items", "baseline", *(model.name for model in evaluation.models)]
    tasks = (f"{name} ({_scored(evaluation, name):,})" for name in evaluation.tasks)
    return ["model", *_amounts(evaluation), *tasks, *(average.label for average in averages(evaluation))]


def rows(evaluation: Evaluation) -> Iterator[list[str]]:
    """Scores with standard errors, the baseline, where that is known, and averages, where a suite has some."""
    yield from _checkpoint_rows(evaluation) if evaluation.runs else _task_rows(evaluation)


def run_columns(evaluation: Evaluation) -> list[str]:
    """The heading of the table of scores that only whole runs have."""
    return ["run", *next(iter(evaluation.over_runs.values()), {})]


def run_rows(evaluation: Evaluation) -> Iterator[list[str]]:
    """A row for each run."""
    for run, results in evaluation.over_runs.items():
        yield [run, *(result.shown for result in results.values())]


def score_cell(evaluation: Evaluation, model: ModelResults, task: str) -> str:
    """A score with its standard error; `Strong` where it is clearly the best."""
    shown = model.tasks[task].shown
    return Strong(shown) if _is_best(evaluation, model, task) else shown


def breakdowns(evaluation: Evaluation) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Task, attribute, heading and rows of its partitions by attributes of the data, for models side by side."""
    for task in evaluation.tasks if not evaluation.runs else ():
        for kind, groups in evaluation.models[0].tasks[task].by.items():
            heading = [kind, "items", *(model.name for model in evaluation.models)]
            results = [model.tasks[task] for model in evaluation.models]
            cells = {name: [_part(result, kind, name) for result in results] for name in groups}
            yield task, kind, heading, [[name, f"{part.count:,}", *cells[name]] for name, part in groups.items()]


def markdown(evaluation: Evaluation) -> str:
    """The table, and below it the tasks, the models and the versions."""
    lines = _table(columns(evaluation), list(rows(evaluation)))
    if evaluation.over_runs:
        table = _table(run_columns(evaluation), list(run_rows(evaluation)))
        lines += ["", "Over all checkpoints of a run:", "", *table]
    lines += ["", *explanations(evaluation), ""]
    lines += [f"- `{name}`: {task_line(facts)}" for name, facts in evaluation.tasks.items()]
    lines += ["", *(f"- `{model.name}`: {model_line(model)}" for model in evaluation.models)]
    lines += ["", f"Computed in {evaluation.dtype}, with {versions_line(evaluation)}."]
    for task, kind, heading, body in breakdowns(evaluation):
        lines += ["", f"`{task}` by {kind}, in percent of the items:", "", *_table(heading, body)]
    return "\n".join(lines) + "\n"


def explanations(evaluation: Evaluation) -> list[str]:
    """The notes below the table."""
    lines = ["± is one standard error" + (f"; {BASELINE}" if any(_chances(evaluation)) else "") + "."]
    if any(verdict.clear for verdict in evaluation.verdicts.values()):
        lines.append(f"Bold: {MARKED}.")
    lines += [f"{average.label}: {average.note}." for average in averages(evaluation)]
    return lines + [f"{line}." for line in too_long_lines(evaluation)]


def too_long_lines(evaluation: Evaluation) -> list[str]:
    """For each task with items longer than the context: how many were truncated or scored in windows."""
    lines = []
    for task in evaluation.tasks:
        by_counts: dict[tuple[int, int], list[str]] = {}
        for model in evaluation.models:
            notes = model.tasks[task].notes
            counts = (notes.get(SHORTENED, 0), notes.get(IN_WINDOWS, 0))
            by_counts.setdefault(counts, []).append(model.name)
        for (shortened, in_windows), models in by_counts.items():
            treatments = (f"{shortened:,} read without their beginning", f"{in_windows:,} scored in windows")
            treated = ", ".join(text for text, count in zip(treatments, (shortened, in_windows), strict=True) if count)
            if treated:
                which = "" if len(by_counts) == 1 else f" ({', '.join(models)})"
                items = _scored(evaluation, task)
                lines.append(f"{task}: of {items:,} items some are longer than the context: {treated}{which}")
    return lines


def task_line(facts: dict[str, Any]) -> str:
    """A task in a sentence."""
    settings = ", ".join(f"{name} {value}" for name, value in facts.get("settings", {}).items() if value is not None)
    with_settings = f" with {settings}" if settings else ""
    return (
        f"{sentence(facts['description'])} Score: {facts['metric']}{with_settings}; {facts['count']:,} items in all; "
        f"version {facts['version']}; licence: {facts['licence']}; SHA-256 of the data {facts['sha256'][:SHORT]}."
    )


def sentence(text: str) -> str:
    """With a full stop, unless it is a question."""
    return text if text[-1] in ".?!" else f"{text}."


def task_table(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of tasks."""
    return ["task", "what it is"], [[f"`{name}`", task_line(facts)] for name, facts in evaluation.tasks.items()]


def model_line(model: ModelResults) -> str:
    """The hash of a model, its active paths, and the modules that it is without."""
    active = "" if model.paths is None else f", active paths: {', '.join(model.paths)}"
    off = "" if model.without is None else f", without {', '.join(model.without)}"
    return f"{model.sha256[:SHORT]}{active}{off}"


def versions_line(evaluation: Evaluation) -> str:
    """The versions of the packages."""
    return ", ".join(f"{package} {version}" for package, version in evaluation.versions.items())


def long_csv(evaluation: Evaluation) -> str:
    """A row for each model, task and part of it, the whole task first; then other metrics, and scores of runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "run", *AMOUNTS, *CSV_COLUMNS])
    for model in evaluation.models:
        identity = [model.name, model.run, *(getattr(model, unit) for unit in AMOUNTS)]
        for name, result in model.tasks.items():
            about = [evaluation.tasks[name]["version"], evaluation.tasks[name]["sha256"], model.sha256]
            best = _is_best(evaluation, model, name)
            writer.writerows([*identity, *line, *about] for line in _csv_lines(name, result, best))
    for run, results in evaluation.over_runs.items():
        for name, result in results.items():
            about = [evaluation.tasks[name]["version"], evaluation.tasks[name]["sha256"], ""]
            lines = _csv_lines(name, result, False)
            writer.writerows(["", run, *("" for _ in AMOUNTS), *line, *about] for line in lines)
    return text.getvalue()


def _csv_lines(task: str, result: TaskResult, best: bool) -> Iterator[list[Any]]:
    """The cells from `task` to `clearly_best`."""
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


def _task_rows(evaluation: Evaluation) -> Iterator[list[str]]:
    for task, chance in zip(evaluation.tasks, _chances(evaluation), strict=True):
        scores = (score_cell(evaluation, model, task) for model in evaluation.models)
        yield [task, f"{_scored(evaluation, task):,}", chance or "-", *scores]
        yield from _part_rows([model.tasks[task] for model in evaluation.models])
    for average in averages(evaluation):
        yield [average.label, "", "", *(_average(average, model) for model in evaluation.models)]


def _scored(evaluation: Evaluation, task: str) -> int:
    """How many items the scores are of: settings may leave some out."""
    return max((model.tasks[task].count for model in evaluation.models), default=evaluation.tasks[task]["count"])


def _part_rows(results: Sequence[TaskResult]) -> Iterator[list[str]]:
    """The parts of a task that has few of them, for models side by side."""
    parts = results[0].parts
    if 1 < len(parts) <= FEW_PARTS:
        for name, part in parts.items():
            cells = ("-" if name not in result.parts else _rounded(result.parts[name].score) for result in results)
            yield [f"- {name}", f"{part.count:,}", "", *cells]


def _rounded(score: float) -> str:
    return f"{score:.2f}" if abs(score) >= 10 else f"{score:.4f}"


def _checkpoint_rows(evaluation: Evaluation) -> Iterator[list[str]]:
    amounts = _amounts(evaluation)
    means = averages(evaluation)
    for model in evaluation.models:
        trained = (f"{getattr(model, unit):,}" for unit in amounts)
        scores = (score_cell(evaluation, model, task) for task in evaluation.tasks)
        yield [model.name, *trained, *scores, *(_average(average, model) for average in means)]
    if any(_chances(evaluation)):
        shown = (chance or "-" for chance in _chances(evaluation))
        yield ["baseline", *("" for _ in amounts), *shown, *("" for _ in means)]


def _chances(evaluation: Evaluation) -> list[str]:
    """The baseline of each task; empty where it is not known."""
    chances = [evaluation.models[0].tasks[task].chance for task in evaluation.tasks]
    return ["" if chance is None else f"{chance:.2f}" for chance in chances]


def _is_best(evaluation: Evaluation, model: ModelResults, task: str) -> bool:
    verdict = evaluation.verdicts.get(task)
    return verdict is not None and verdict.clear and verdict.best == model.name


def _average(average: Average, model: ModelResults) -> str:
    return f"{average.scores[model.name]:.2f}" if model.name in average.scores else "-"


def _part(result: TaskResult, kind: str, name: str) -> str:
    part = result.by.get(kind, {}).get(name)
    return "-" if part is None else f"{part.score:.2f}"


def _amounts(evaluation: Evaluation) -> list[str]:
    """For checkpoints the first unit in which the training of all is known."""
    if not evaluation.runs:
        return []
    return [unit for unit in AMOUNTS if all(getattr(model, unit) for model in evaluation.models)][:1]


def _table(heading: Sequence[str], body: Sequence[Sequence[Any]]) -> list[str]:
    return [_line(heading), "|" + " --- |" * len(heading), *(_line(row) for row in body)]


def _line(cells: Sequence[Any]) -> str:
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    shown = (f"**{text}**" if isinstance(cell, Strong) else text for cell, text in zip(cells, escaped, strict=True))
    return "| " + " | ".join(shown) + " |"
