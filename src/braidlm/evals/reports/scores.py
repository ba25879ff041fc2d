"""The report of scores: results.html, results.md, results.csv and results.json.

Models that are compared stand side by side, a task in each row; the checkpoints of runs are many, and stand below each
other. A cell that is `Strong` is significantly the best of its task (`statistics.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from braidlm.core.report.report import Report, Strong, Table, listed
from braidlm.evals.babylm.averages import averages
from braidlm.evals.results import QUOTES, Evaluation, ModelResults, Part, TaskResult
from braidlm.evals.scoring.requests import IN_WINDOWS, SHORTENED

AMOUNTS = ("words", "tokens", "steps")
FIXED = ("task", "items", "baseline")
"""The columns before the models' columns."""
CSV_COLUMNS = (
    *("task", "part", "measure", "score", "standard_error", "count", "baseline", "clearly_best"),
    *("version", "data_sha256", "model_sha256"),
)
MARKED = (
    "the best by more than two standard errors of its difference from the next (item by item where the task's items "
    "allow, else of both scores' errors in quadrature)"
)
BASELINE = "baseline: what guessing gives, or always giving the most frequent answer"
MODELS_BESIDE = 3
"""More models than this, and than tasks, have a row each: columns of many models do not fit a screen."""
FEW_PARTS = 6
"""A task of two to so many parts, such as texts of your own, has a row for each of them in the first table."""
MAX_PARTS = 12
"""The largest number of parts for which a task has a table; others are in the files only."""
SHORT = 12
"""Characters of a hash that are shown."""


def scores_report(evaluation: Evaluation) -> Report:
    """The table, differences between models, parts of tasks, then tasks, models and versions."""
    names = ", ".join(model.name for model in evaluation.models)
    tasks = f"{len(evaluation.tasks)} task{'s' if len(evaluation.tasks) > 1 else ''}"
    report = Report("Scores", f"{names} on {tasks}", tables=[long_table(evaluation)])
    report.data = {"babylm": evaluation.averages} if evaluation.averages else {}
    report.data["results"] = evaluation.facts()
    report.verdict = verdict(evaluation)
    report.table(score_table(evaluation))
    if evaluation.over_runs:
        report.table(run_table(evaluation))
    for line in explanations(evaluation):
        report.text(line)
    if evaluation.verdicts and not evaluation.runs:
        report.heading("Differences").table(_difference_table(evaluation))
    for task in evaluation.tasks if not evaluation.runs else ():
        _add_parts(report, evaluation, task)
        _add_quotes(report, evaluation, task)
    return add_method(report, evaluation)


def add_method(report: Report, evaluation: Evaluation) -> Report:
    """What was measured, of which models, and by which versions."""
    report.heading("What was measured").table(task_table(evaluation))
    columns: dict[str, list[Any]] = {"model": [model.name for model in evaluation.models]}
    if any(model.paths is not None for model in evaluation.models):
        columns["active paths"] = [", ".join(model.paths) if model.paths else "all" for model in evaluation.models]
    if any(model.without is not None for model in evaluation.models):
        columns["modules switched off"] = [", ".join(model.without or ["none"]) for model in evaluation.models]
    columns["SHA-256 begins with"] = [f"`{model.sha256[:SHORT]}`" for model in evaluation.models]
    report.table(Table(list(columns), list(zip(*columns.values(), strict=True))))
    versions = ", ".join(f"{package} {version}" for package, version in evaluation.versions.items())
    report.text(f"Computed in {evaluation.dtype}, with {versions}.")
    return report.text("Every part of every task is in `results.json` and `results.csv` beside this page.")


def verdict(evaluation: Evaluation) -> str:
    """Which model is the best of each task, by how much and how sure; of one model, its scores beside guessing."""
    found, first = evaluation.verdicts, evaluation.models[0]
    if not found:
        scores = [
            f"{task} {result.shown}{'' if result.chance is None else f' (guessing gives {result.chance:.4g})'}"
            for task, result in first.tasks.items()
        ]
        return f"{first.name} has {listed(scores)}.\n\nHow sure: ± is one standard error over the items of a task."
    won: dict[str, list[str]] = {}
    for task, (difference, error) in _differences(evaluation).items():
        best, clear = found[task].best, found[task].clear
        by = f"by {difference} ± {error} over {found[task].next}"
        if found[task].standard_error is None:
            by = f"by {difference} over {found[task].next}, with an error that is not known"
        by = f" ({by if clear else f'{best} is ahead {by}'})" if len(found) <= FEW_PARTS else ""
        won.setdefault(best if clear else "", []).append(f"{task}{by}")
    unclear, of = won.pop("", []), f" of {len(found)} tasks"
    sentences = [f"{name} is clearly the best on {len(tasks)}{of}: {listed(tasks)}." for name, tasks in won.items()]
    if unclear:
        which = "No model" if won else f"No model of {len(evaluation.models)}"
        sentences.append(f"{which} is clearly the best on {listed(unclear)}.")
    return (
        f"{' '.join(sentences)}\n\nHow sure: clear is a difference of more than two standard errors, over the items of "
        "a task. How far another seed of the training would move a score is not in it."
    )


def score_table(evaluation: Evaluation) -> Table:
    """Scores with standard errors, the baseline, where it is known, and averages, where a suite has some."""
    means, chances = averages(evaluation), _chances(evaluation)
    of_models = {label: {name: f"{score:.2f}" for name, score in scores.items()} for label, _, scores in means}
    rows = []
    if not evaluation.runs and len(evaluation.models) <= max(MODELS_BESIDE, len(evaluation.tasks)):
        for task, chance in zip(evaluation.tasks, chances, strict=True):
            scores = (score_cell(evaluation, model, task) for model in evaluation.models)
            rows.append([task, f"{_scored(evaluation, task):,}", chance or "-", *scores])
            for name in (name for own, name in _few_parts(evaluation) if own == task):
                cells = (_part_cell(model.tasks[task].parts.get(name)) for model in evaluation.models)
                rows.append([f"- {name}", f"{evaluation.models[0].tasks[task].parts[name].count:,}", "", *cells])
        models = [model.name for model in evaluation.models]
        rows += [[label, "", "", *(each.get(name, "-") for name in models)] for label, each in of_models.items()]
        return Table([*FIXED, *models], rows, keep=len(FIXED))
    # The first unit in which the training of all checkpoints is known.
    known = [unit for unit in AMOUNTS if all(getattr(model, unit) for model in evaluation.models)]
    units, parts = known[:1] if evaluation.runs else [], [] if evaluation.runs else list(_few_parts(evaluation))
    for model in evaluation.models:
        trained = (f"{getattr(model, unit):,}" for unit in units)
        scores = (score_cell(evaluation, model, task) for task in evaluation.tasks)
        of_parts = (_part_cell(model.tasks[task].parts.get(name)) for task, name in parts)
        means_of = (each.get(model.name, "-") for each in of_models.values())
        rows.append([model.name, *trained, *scores, *of_parts, *means_of])
    if any(chances):
        empty = ["" for _ in (*parts, *means)]
        rows.append(["baseline", *("" for _ in units), *(chance or "-" for chance in chances), *empty])
    tasks = (f"{name} ({_scored(evaluation, name):,})" for name in evaluation.tasks)
    names = (f"{task}, {name}" if len(evaluation.tasks) > 1 else name for task, name in parts)
    return Table(["model", *units, *tasks, *names, *of_models], rows, keep=1 + len(units))


def _few_parts(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Tasks of a few parts, such as texts of your own, each with the names of its parts."""
    for task, result in evaluation.models[0].tasks.items():
        if 1 < len(result.parts) <= FEW_PARTS:
            yield from ((task, name) for name in result.parts)


def _part_cell(part: Part | None) -> str:
    return f"{part.score:.{2 if abs(part.score) >= 10 else 4}f}" if part else "-"


def run_table(evaluation: Evaluation) -> Table:
    """The scores that only whole runs have."""
    rows = [[run, *(one.shown for one in results.values())] for run, results in evaluation.over_runs.items()]
    columns = ["run", *next(iter(evaluation.over_runs.values()), {})]
    return Table(columns, rows, "What only all checkpoints of a run together have.")


def score_cell(evaluation: Evaluation, model: ModelResults, task: str) -> str:
    """A score with its standard error; `Strong` where it is clearly the best."""
    shown = model.tasks[task].shown
    return Strong(shown) if _is_best(evaluation, model, task) else shown


def explanations(evaluation: Evaluation, strong: str = "Bold:") -> list[str]:
    """The notes below the table; `strong` is how the best score is marked."""
    lines = ["± is one standard error" + (f"; {BASELINE}" if any(_chances(evaluation)) else "") + "."]
    if any(verdict.clear for verdict in evaluation.verdicts.values()):
        lines.append(f"{strong} {MARKED}.")
    lines += [f"{label}: {note}." for label, note, _ in averages(evaluation)]
    return lines + [line for task in evaluation.tasks for line in _too_long(evaluation, task)]


def _too_long(evaluation: Evaluation, task: str) -> Iterator[str]:
    """How many items of a task are longer than the context, and were truncated or scored in windows."""
    by_counts: dict[tuple[int, int], list[str]] = {}
    for model in evaluation.models:
        notes = model.tasks[task].notes
        by_counts.setdefault((notes.get(SHORTENED, 0), notes.get(IN_WINDOWS, 0)), []).append(model.name)
    for (shortened, in_windows), models in by_counts.items():
        treated = [f"{shortened:,} read without their beginning"] if shortened else []
        treated += [f"{in_windows:,} scored in windows"] if in_windows else []
        if treated:
            which = "" if len(by_counts) == 1 else f" ({', '.join(models)})"
            items = f"{task}: of {_scored(evaluation, task):,} items some are longer than the context"
            yield f"{items}: {', '.join(treated)}{which}."


def task_table(evaluation: Evaluation) -> Table:
    rows = []
    for name, facts in evaluation.tasks.items():
        given = {key: value for key, value in facts.get("settings", {}).items() if value is not None}
        settings = [f"{key} {', '.join(map(str, v)) if isinstance(v, list | tuple) else v}" for key, v in given.items()]
        with_settings = f" with {', '.join(settings)}" if settings else ""
        about = (
            f"{sentence(facts['description'])} Score: {facts['metric']}{with_settings}; {facts['count']:,} items in "
            f"all; version {facts['version']}; licence: {facts['licence']}; SHA-256 of the data "
            f"{facts['sha256'][:SHORT]}."
        )
        rows.append([f"`{name}`", about])
    return Table(["task", "what it is"], rows)


def sentence(text: str) -> str:
    """A description with a full stop, unless it is a question."""
    return text if text[-1] in ".?!" else f"{text}."


def _differences(evaluation: Evaluation) -> dict[str, tuple[str, str]]:
    """The difference of the best two models of each task and its error, rounded to two digits of the error."""
    shown = {}
    for task, found in evaluation.verdicts.items():
        difference, error = f"{round(found.difference, 7):.4g}", "–" if found.standard_error is None else "0"
        if found.standard_error:  # else the difference of equal sums is a rounding error
            digits = max(0, 1 - math.floor(math.log10(found.standard_error)))
            difference, error = (f"{each:.{digits}f}" for each in (found.difference, found.standard_error))
        shown[task] = (difference, error)
    return shown


def _difference_table(evaluation: Evaluation) -> Table:
    rows = []
    for task, numbers in _differences(evaluation).items():
        found = evaluation.verdicts[task]
        rows.append([f"`{task}`", found.best, found.next, *numbers, "paired" if found.paired else "apart", found.clear])
    columns = ["task", "best", "next", "difference", "standard error", "items", "clear"]
    caption = "Clear: more than two standard errors of the difference. Paired: the error is that of the differences "
    return Table(columns, rows, f"{caption}item by item; apart: both scores' errors in quadrature.")


def _add_parts(report: Report, evaluation: Evaluation, task: str) -> None:
    """The partitions of a task by attributes of the data, the task by other measures, and its parts."""
    results = [model.tasks[task] for model in evaluation.models]
    models = [model.name for model in evaluation.models]
    for kind, groups in results[0].by.items():
        scores = {name: [result.by.get(kind, {}).get(name) for result in results] for name in groups}
        rows = [[name, part.count, *_formatted(scores[name], digits=2)] for name, part in groups.items()]
        caption = "Percent of the items that are right."
        report.heading(f"`{task}` by {kind}", 3).table(Table([kind, "items", *models], rows, caption))
    if results[0].also:
        report.heading(f"`{task}` by other measures", 3).table(other_measures(evaluation, task))
    parts = results[0].parts
    if FEW_PARTS < len(parts) <= MAX_PARTS:  # few stand in the first table
        cells = iter(_formatted([result.parts.get(name) for name in parts for result in results]))
        rows = [[name, part.count, *(next(cells) for _ in results)] for name, part in parts.items()]
        report.heading(f"Parts of `{task}`", 3).table(Table(["part", "items", *models], rows))


def other_measures(evaluation: Evaluation, task: str) -> Table:
    """What a task measures beside its score."""
    results = [model.tasks[task] for model in evaluation.models]
    rows = [[name, *_formatted([result.also.get(name) for result in results])] for name in results[0].also]
    return Table(["measure", *(model.name for model in evaluation.models)], rows)


def _add_quotes(report: Report, evaluation: Evaluation, task: str) -> None:
    """Texts that a task shows of each model, such as passages that one gives away."""
    for model in evaluation.models:
        quotes = model.tasks[task].notes.get(QUOTES, [])
        for kind in dict.fromkeys(quote["kind"] for quote in quotes):
            report.heading(f"`{task}`, {kind}: {model.name}", 3)
            for quote in quotes:
                if quote["kind"] == kind:
                    report.quote(quote["text"], model.name, prompt=quote["prompt"])


def _formatted(values: Sequence[Part | float | None], digits: int | None = None) -> list[str]:
    """Numbers, or scores of parts, with as many decimals as suit the largest of them."""
    numbers = [value.score if isinstance(value, Part) else value for value in values]
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    digits = digits if digits is not None else 0 if largest >= 10_000 else 2 if largest >= 10 else 4
    return ["–" if number is None else f"{number:,.{digits}f}" for number in numbers]


def long_table(evaluation: Evaluation) -> Table:
    """A row for each model, task and part of it, the whole task first; then other metrics, and scores of runs."""
    rows: list[list[Any]] = []

    def add(identity: list[Any], results: Mapping[str, TaskResult], sha256: str, best: Sequence[str]) -> None:
        for task, result in results.items():
            measure, count = result.metric, result.count
            known = [None if number is None else f"{number:.6g}" for number in (result.standard_error, result.chance)]
            whole = [f"{result.score:.8g}", known[0], count, known[1], "yes" if task in best else None]
            by = {f"{kind}: {name}": part for kind, parts in result.by.items() for name, part in parts.items()}
            lines = [
                ["all", measure, *whole],
                *([n, measure, f"{p.score:.8g}", None, p.count, None, None] for n, p in (result.parts | by).items()),
                *(["all", name, f"{score:.8g}", None, count, None, None] for name, score in result.also.items()),
            ]
            about = [evaluation.tasks[task]["version"], evaluation.tasks[task]["sha256"], sha256]
            rows.extend([*identity, task, *line, *about] for line in lines)

    for model in evaluation.models:
        best = [task for task in model.tasks if _is_best(evaluation, model, task)]
        amounts = [getattr(model, unit) for unit in AMOUNTS]
        add([model.name, model.run, *amounts], model.tasks, model.sha256, best)
    for run, results in evaluation.over_runs.items():
        add([None, run, *(None for _ in AMOUNTS)], results, "", ())
    return Table(["model", "run", *AMOUNTS, *CSV_COLUMNS], rows, name="results")


def _scored(evaluation: Evaluation, task: str) -> int:
    """How many items were scored: settings may leave some out."""
    return max((model.tasks[task].count for model in evaluation.models), default=evaluation.tasks[task]["count"])


def _chances(evaluation: Evaluation) -> list[str]:
    """The baseline of each task; empty where it is not known."""
    chances = [evaluation.models[0].tasks[task].chance for task in evaluation.tasks]
    return ["" if chance is None else f"{chance:.2f}" for chance in chances]


def _is_best(evaluation: Evaluation, model: ModelResults, task: str) -> bool:
    verdict = evaluation.verdicts.get(task)
    return verdict is not None and verdict.clear and verdict.best == model.name
