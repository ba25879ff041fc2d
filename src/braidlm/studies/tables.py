"""The tables of a study, as rows of text: for the terminal, for Markdown and CSV files, and for the page."""

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from braidlm.core.console import count
from braidlm.core.console import duration as rough_duration
from braidlm.core.differences import Differences, shown
from braidlm.core.report.report import Report, Table
from braidlm.core.report.verdicts import spread
from braidlm.evals.babylm.averages import published_rows
from braidlm.studies.results import Bits, ModelResult, StudyResults
from braidlm.studies.steps import EditStep
from braidlm.studies.study import Role

MAX_DIFFERENCES = 60
"""Rows of the table of what differs; models of different shapes differ in more, and the page has both in full."""


def duration(seconds: float) -> str:
    """With a decimal where it is short."""
    return f"{seconds:.1f}s" if seconds < 60 else rough_duration(seconds)


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seed": ("seed", str),
    "parameters": ("parameters", "{:,}".format),
    "active": ("active_parameters", "{:,}".format),
    "FLOPs per token": ("flops_per_token", lambda flops: count(float(flops))),
    "words": ("words", count),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "memory": ("memory", lambda size: f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"),
    "bits per byte": ("bits_per_byte", "{:.4f}".format),
    "best": ("best_bits_per_byte", "{:.4f}".format),
    "best at step": ("best_step", "{:,}".format),
    "training": ("seconds", duration),
    "wall clock": ("wall_seconds", duration),
    "hardware": ("hardware", str),
    "state": ("state", str),
}
"""The columns of tables of runs: the fact that each shows, and how."""


def cells(facts: Mapping[str, Any], columns: Sequence[str]) -> list[str | None]:
    """What people read of the facts of a run in these columns; None for what is not known."""
    known = [(facts[key], form) for key, form in (COLUMNS[column] for column in columns)]
    return [None if value is None else form(value) for value, form in known]


def add_differences(report: Report, differing: Differences) -> None:
    """A row for each key in which recipes differ, and a column for each recipe."""
    if not differing:
        return
    names = next(iter(differing.values()))
    rows = [[key, *(None if one is None else shown(one) for one in own.values())] for key, own in differing.items()]
    report.heading("In what the recipes differ").table(Table(["key", *names], rows[:MAX_DIFFERENCES]))
    if (more := len(differing) - MAX_DIFFERENCES) > 0:
        report.text(f"And {more} more keys, in the recipes below.")


def add_recipes(report: Report, recipes: Mapping[str, dict[str, Any]]) -> None:
    """Every recipe in full, below its name."""
    for name, recipe in recipes.items():
        report.code(json.dumps(recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {name}")


def tables(results: StudyResults) -> list[Table]:
    """Every table that is not empty for this study; a number stands in one of them."""
    composed = results.names("composed")
    shown: dict[Callable[[StudyResults], Table], Any] = {
        quality: True,
        variants: results.names("variant"),
        task_scores: results.study.tasks is not None,
        babylm: any(model.babylm for model in results.models),
        cost: True,
        training_time: composed,
        inactive_paths: composed,
    }
    return [table(results) for table, is_shown in shown.items() if is_shown]


def quality(results: StudyResults) -> Table:
    """How well each model predicts each domain, and both halves of the held-out text where there are two."""
    rows, half = [], results.study.validation.half
    for name in results.names():
        models = results.of(name)
        each = [_scores(model, results.domains) for model in models]
        means = (spread([scores[column] for scores in each], digits=4) for column in each[0])
        rows.append([name, kind_label(models[0].kind), str(len(models)), *means])
    columns = ["model", "", "seeds", *_scores(results.models[0], results.domains)]
    text = (
        "held-out text" if half is None or len(results.domains) == 1 else f"held-out text, of domains the {half} half"
    )
    return _table("bits-per-byte", f"Bits per byte on {text} (lower is better)", columns, rows, results)


def _scores(model: ModelResult, domains: Sequence[str]) -> Bits:
    """Each domain, then the mean over them of each half, or of all; a number once where there is one domain."""
    halves = {f"{half} half": mean(bits.values()) for half, bits in model.halves.items()}
    if len(domains) == 1:
        return halves or model.bits
    return {domain: model.bits[domain] for domain in domains} | (halves or {"mean": mean(model.bits.values())})


def variants(results: StudyResults) -> Table:
    """What each variant gains and loses against what it was made of (ModuleFormer's Tables 4 and 5)."""
    rows = []
    bases = list(dict.fromkeys(results.base_of(m).name for m in results.models if m.kind == "variant"))
    for name in [*bases, *results.names("variant")]:
        models = results.of(name)
        how: str = "base"
        scores: list[str | None] = [None] * len(results.domains)
        if models[0].kind == "variant":
            how = _how(results, name)
            changes = ([m.bits[d] - results.base_of(m).bits[d] for m in models] for d in results.domains)
            scores = [spread(each, sign="+") for each in changes]
        trainable = models[0].trainable
        rows.append([name, how, *scores, f"{trainable:,}" if trainable else None])
    columns = ["model", "made by", *(f"{domain}, change" for domain in results.domains), "trainable"]
    return _table("variants", "What edits and further training changed, in bits per byte", columns, rows)


def task_scores(results: StudyResults) -> Table:
    """Every model on the study's tasks: over the seeds, then the error that one score has from its items."""
    tasks = list(results.models[0].tasks)
    rows: list[list[str | None]] = []
    for name in results.names():
        rows.append([name])
        for task in tasks:
            models = results.of(name)
            errors = [m.task_errors[task] for m in models if task in m.task_errors]
            rows[-1] += [spread([m.tasks[task] for m in models], digits=2), f"{mean(errors):.2f}" if errors else None]
    if results.chance:
        chances = [results.chance.get(task) for task in tasks]
        cells = ((None if chance is None else f"{chance:.2f}", None) for chance in chances)
        rows.append(["by chance", *(cell for pair in cells for cell in pair)])
    columns = [column for task in tasks for column in (task, f"{task}, standard error")]
    return _table("tasks", "Scores on tasks", ["model", *columns], rows)


def babylm(results: StudyResults) -> Table:
    """The columns of the MoEP paper's Table 1 that were evaluated, and its rows below, which are of another corpus."""
    rows, columns = [], list(results.models[0].babylm)
    for name in results.names():
        models = results.of(name)
        scores = [[m.babylm[column] for m in models] for column in columns]
        means = [sum(m.babylm.values()) / len(m.babylm) for m in models]
        rows.append([name, *(spread(each, digits=2) for each in (*scores, means))])
    for name, row in published_rows(columns).items():
        average = sum(row.values()) / len(row)
        rows.append([f"{name}, published", *(f"{row[column]:.2f}" for column in columns), f"{average:.2f}"])
    title = "BabyLM 2025 by the columns of Table 1 of the MoEP paper, whose rows are of the challenge's own corpus"
    return _table("babylm", title, ["model", *columns, "average"], rows)


def _how(results: StudyResults, name: str) -> str:
    """`insert, german 4 : english 1`: a variant's edits and what it was trained on."""
    study, step = results.study, results.study.steps[name]
    words = [other for other in study.inputs(name) if study.role(other) == "variant"]
    if isinstance(step, EditStep):
        words += [edit if isinstance(edit, str) else next(iter(edit)) for edit in step.edit]
    domains = study.domains_of(name)
    if step.train is not None and isinstance(step.train.domains, dict) and len(domains) > 1:
        words.append(" : ".join(f"{domain} {share:g}" for domain, share in step.train.domains.items()))
    elif domains:
        words.append(" + ".join(domains))
    return ", ".join(words)


def learning(results: StudyResults) -> Table:
    """Every validation of the models trained from scratch: on the same batches, a row for each mark. For programs: the
    page draws it."""
    rows: dict[str, dict[str, list[float]]] = {}
    points = [(point, model.name) for model in results.models if model.kind == "whole" for point in model.curve]
    for point, name in sorted(points, key=lambda pair: pair[0].seen(results.unit)):
        seen = count(point.seen(results.unit))
        rows.setdefault(seen, {}).setdefault(name, []).append(mean(point.bits.values()))
    names = results.names("whole")
    body = [[seen, *(spread(own[name]) if name in own else None for name in names)] for seen, own in rows.items()]
    return _table("learning", "Bits per byte during the training", [results.unit, *names], body)


def cost(results: StudyResults) -> Table:
    """The size of each model, the text that it and what it is made of have seen, and the time of its own training."""
    rows, unit = [], results.unit
    for name in results.names():
        models = results.of(name)
        first, took = models[0], mean(m.seconds for m in models)
        walls = [m.wall_seconds for m in models]
        sizes = (first.parameters, first.active_parameters, first.flops_per_token)
        apart = (sum(getattr(m, unit) for m in each) for each in (results.before(first), [first]))
        seen = [amount for amount in apart if amount] or [0]
        speed = count(round(first.tokens / took)) if took and first.kind != "average" else None  # which is not trained
        times = duration(took) if took else None, duration(mean(walls)) if all(walls) else None
        rows.append([name, *(f"{size:,}" for size in sizes), " + ".join(map(count, seen)), speed, *times])
    columns = ["model", "parameters", "active", "FLOPs per token", unit, "tokens/s", "training", "wall clock"]
    return _table("cost", "Size and speed", columns, rows)


def training_time(results: StudyResults) -> Table:
    """PaPaformer's Table 4: with paths trained one after another, and in parallel."""
    took = {name: mean(m.seconds for m in results.of(name)) for name in results.names()}
    rows = [[name, duration(took[name]), None, duration(took[name])] for name in results.names("path")]
    for name in results.names("composed"):
        before = list(dict.fromkeys(m.name for m in results.before(results.of(name)[0])))
        apart, second = " + ".join(duration(took[part]) for part in before), took[name]
        rows.append([name, f"({apart})", duration(second), duration(sum(took[part] for part in before) + second)])
        lines = [[*results.study.before(part), part] for part in results.study.steps[name].reads]
        first = max(sum(took[one] for one in line) for line in lines)
        rows.append([f"{name}, paths in parallel", duration(first), duration(second), duration(first + second)])
    rows += [[name, None, duration(took[name]), duration(took[name])] for name in results.names("whole")]
    return _table("training-time", "Training time", ["model", "stage 1", "stage 2", "total"], rows)


def inactive_paths(results: StudyResults) -> Table:
    """The cost of withdrawing a path from a composed model."""
    rows = []
    for name in results.names("composed"):
        models = results.of(name, "composed")
        rows.append([name, "none", *_bits(results, models)])
        for path in models[0].silenced:
            costs = [mean(m.silenced[path][d] - m.bits[d] for m in models) for d in results.domains]
            rows.append([name, path, *(spread([each], sign="+") for each in costs)])
    title = "Bits per byte with every path active, and the change when one is inactive"
    return _table("silent-paths", title, ["model", "inactive", *results.domains], rows)


def _table(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | None]],
    ranked: StudyResults | None = None,
) -> Table:
    """A table with its files; what there is not is a dash in them too. The best of models that are ranked is marked."""
    body = [["–" if cell is None else cell for cell in row] for row in rows]
    bits = [mean(mean(m.bits.values()) for m in ranked.of(row[0] or "")) for row in rows] if ranked else []
    best = bits.index(min(bits)) if len(bits) > 1 else None
    return Table(columns, body, name=f"tables/{name}", title=title, keep=1, best=best)


def kind_label(kind: Role) -> str:
    """A kind of model in the words of tables."""
    return "from scratch" if kind == "whole" else kind


def _bits(results: StudyResults, models: Sequence[ModelResult]) -> list[str | None]:
    """The bits per byte of one model with several seeds, on each domain."""
    return [spread([m.bits[domain] for m in models]) for domain in results.domains]
