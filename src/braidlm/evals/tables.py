"""Results as tables: columns and rows for the terminal and Markdown, and one long file for programs."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from braidlm.evals.results import Evaluation, ModelResults

AMOUNTS = ("words", "tokens", "steps")


def columns(found: Evaluation) -> list[str]:
    """The heading of the table of models and tasks."""
    return ["model", *_amounts(found), *(f"{name} ({facts['count']:,})" for name, facts in found.tasks.items())]


def rows(found: Evaluation) -> Iterator[list[str]]:
    """A row for each model, with standard errors; then what guessing gives, where that is known."""
    amounts = _amounts(found)
    for model in found.models:
        yield [model.name, *(f"{getattr(model, unit):,}" for unit in amounts), *_scores(model, found)]
    chances = [found.models[0].tasks[task].chance for task in found.tasks]
    if any(chance is not None for chance in chances):
        shown = ("-" if chance is None else f"{chance:.2f}" for chance in chances)
        yield ["by chance", *("" for _ in amounts), *shown]


def markdown(found: Evaluation) -> str:
    """The table, and under it what was measured."""
    head = columns(found)
    lines = [_line(head), "|" + " --- |" * len(head), *(_line(row) for row in rows(found)), ""]
    for name, facts in found.tasks.items():
        lines.append(f"- `{name}`: {facts['description']}. {facts['metric']}; data {facts['sha256'][:12]}.")
    lines.append(f"\nComputed in {found.dtype}; ± is one standard error.")
    return "\n".join(lines) + "\n"


def long_csv(found: Evaluation) -> str:
    """A row for each model, task and part of it, the whole task first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "run", *AMOUNTS, "task", "part", "score", "standard_error", "count"])
    for model in found.models:
        known = [model.name, model.run, *(getattr(model, unit) for unit in AMOUNTS)]
        for name, result in model.tasks.items():
            error = "" if result.standard_error is None else f"{result.standard_error:.6g}"
            writer.writerow([*known, name, "all", f"{result.score:.8g}", error, result.count])
            for part, one in result.parts.items():
                writer.writerow([*known, name, part, f"{one.score:.8g}", "", one.count])
    return text.getvalue()


def _amounts(found: Evaluation) -> list[str]:
    """For checkpoints, how far they are trained, in the first unit that all know."""
    if not found.runs:
        return []
    return [unit for unit in AMOUNTS if all(getattr(model, unit) for model in found.models)][:1]


def _scores(model: ModelResults, found: Evaluation) -> list[str]:
    return [model.tasks[task].shown for task in found.tasks]


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
