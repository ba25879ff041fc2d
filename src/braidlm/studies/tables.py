"""The tables of a study, as rows of text: for the terminal, for Markdown and CSV files, and for the page."""

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from braidlm.core.console import count
from braidlm.core.console import duration as rough_duration
from braidlm.core.report.report import Report, Table
from braidlm.evals.babylm.averages import column_mean, published_rows
from braidlm.studies.results import Bits, ModelResult, StudyResults, over_seeds
from braidlm.studies.steps import EditStep
from braidlm.studies.study import Role


def duration(seconds: float) -> str:
    """With a decimal where it is short."""
    return f"{seconds:.1f}s" if seconds < 60 else rough_duration(seconds)


def memory_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seed": ("seed", str),
    "parameters": ("parameters", "{:,}".format),
    "active": ("active_parameters", "{:,}".format),
    "FLOPs per token": ("flops_per_token", lambda flops: count(float(flops))),
    "words": ("words", count),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "memory": ("memory", memory_text),
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


def add_recipes(report: Report, recipes: Mapping[str, dict[str, Any]]) -> None:
    """Every recipe in full, below its name."""
    for name, recipe in recipes.items():
        report.code(json.dumps(recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {name}")


def tables(results: StudyResults) -> list[Table]:
    """Every table that is not empty for this study."""
    all_tables = [quality(results)] if results.names("path", "composed", "whole") else []
    if results.names("variant"):
        all_tables.insert(0, variants(results))
    if results.names("average") or results.study.validation.half is not None:
        all_tables.insert(0, summary(results))
    if results.names("whole") and not results.names("path") and any(len(model.curve) > 1 for model in results.models):
        all_tables.append(learning(results))
    if results.study.tasks is not None:
        all_tables.append(task_scores(results))
    if any(model.babylm for model in results.models):
        all_tables.append(babylm(results))
    all_tables.append(cost(results))
    if results.names("path"):
        all_tables.append(training_time(results))
    if results.names("composed"):
        all_tables.append(inactive_paths(results))
    return all_tables


def summary(results: StudyResults) -> Table:
    """Every model with what it costs and what it reaches, on both halves of the held-out text where there are two."""
    halves, tasks = list(results.models[0].halves), list(results.models[0].tasks)
    rows = []
    for name in results.names():
        models = results.of(name)
        first, trainings = models[0], [[*results.before(m), m] for m in models]
        took = mean(sum(one.seconds for one in each) for each in trainings)
        wall = mean(sum(one.wall_seconds for one in each) for each in trainings)
        words = [sum(m.words for m in each) for each in (results.before(first), [first]) if each]
        bits = [[m.halves[half] for m in models] for half in halves] or [[m.bits for m in models]]
        sizes = [f"{first.parameters:,}", *cells(vars(first), ["FLOPs per token"]), " + ".join(map(count, words))]
        rows.append(
            [
                *(name, kind_label(first.kind), str(len(models)), *sizes),
                *(over_seeds([_mean_bits(each) for each in half]).text(digits=4) for half in bits),
                *(over_seeds([m.tasks[task] for m in models]).text(digits=2) for task in tasks),
                *(duration(took) if first.words else "–", duration(wall)),
            ]
        )
    scores = [f"bits per byte, {half} half" for half in halves] or ["bits per byte"]
    sizes = ["parameters", "FLOPs per token", "words"]
    columns = ["model", "", "seeds", *sizes, *scores, *tasks, "training", "wall clock"]
    return _table("models", "Every model: what it costs and what it reaches", columns, rows)


def quality(results: StudyResults) -> Table:
    """How well each model predicts each domain."""
    rows = []
    kinds: tuple[Role, ...] = ("path", "composed", "whole", "average", "distilled")
    for kind in kinds:
        for name in results.names(kind):
            models = results.of(name, kind)
            scores = [over_seeds([m.bits[domain] for m in models]).text() for domain in results.domains]
            if len(results.domains) > 1:
                scores.append(over_seeds([_mean_bits(m.bits) for m in models]).text())
            tokens = [sum(m.tokens for m in each) for each in (results.before(models[0]), [models[0]]) if each]
            seen = " + ".join(map(count, tokens))
            rows.append([name, kind_label(kind), f"{models[0].parameters:,}", seen, *scores])
    columns = ["model", "", "parameters", "tokens", *results.domains, *(["mean"] if len(results.domains) > 1 else [])]
    half = results.study.validation.half
    text = "held-out text" if half is None else f"the {half} half of held-out text"
    return _table("bits-per-byte", f"Bits per byte on {text} (lower is better)", columns, rows)


def variants(results: StudyResults) -> Table:
    """What each variant gains and loses against what it was made of (ModuleFormer's Tables 4 and 5)."""
    rows = []
    bases = list(dict.fromkeys(results.base_of(m).name for m in results.models if m.kind == "variant"))
    for name in [*bases, *results.names("variant")]:
        models = results.of(name)
        first = models[0]
        is_variant = first.kind == "variant"
        cells = []
        for domain in results.domains:
            cells.append(over_seeds([m.bits[domain] for m in models]).text())
            changes = [m.bits[domain] - results.base_of(m).bits[domain] for m in models] if is_variant else []
            cells.append(_spread_change(changes) if changes else "–")
        trainable = f"{first.trainable:,}" if first.trainable else "–"
        took = duration(_seconds(models)) if first.tokens else "–"
        how = _how(results, name) if is_variant else "base"
        rows.append([name, how, f"{first.parameters:,}", trainable, *cells, took])
    scores = [column for domain in results.domains for column in (domain, f"{domain}, change")]
    columns = ["model", "made by", "parameters", "trainable", *scores, "training"]
    return _table("variants", "Bits per byte of the variants, and the change against the base", columns, rows)


def task_scores(results: StudyResults) -> Table:
    """Every model on the study's tasks."""
    names = list(results.models[0].tasks)
    rows = [
        [name, *(over_seeds([m.tasks[task] for m in results.of(name)]).text(digits=2) for task in names)]
        for name in results.names()
    ]
    return _table("tasks", "Scores on tasks", ["model", *names], rows)


def babylm(results: StudyResults) -> Table:
    """The columns of the MoEP paper's Table 1 that were evaluated, and its rows below, which are of another corpus."""
    columns = list(results.models[0].babylm)
    rows = []
    for name in results.names():
        models = results.of(name)
        scores = [[m.babylm[column] for m in models] for column in columns]
        means = [column_mean(m.babylm) for m in models]
        rows.append([name, *(over_seeds(each).text(digits=2) for each in (*scores, means))])
    for name, row in published_rows(columns).items():
        rows.append([f"{name}, published", *(f"{row[column]:.2f}" for column in columns), f"{column_mean(row):.2f}"])
    title = "BabyLM 2025 by the columns of Table 1 of the MoEP paper, whose rows are of the challenge's own corpus"
    return _table("babylm", title, ["model", *columns, "average"], rows)


def _how(results: StudyResults, name: str) -> str:
    """`insert, german 4 : english 1`: a variant's edits and what it was trained on."""
    study = results.study
    step = study.steps[name]
    words = [other for other in step.reads if other in study.steps and study.role(other) == "variant"]
    if isinstance(step, EditStep):
        words += [edit if isinstance(edit, str) else next(iter(edit)) for edit in step.edit]
    domains = study.domains_of(name)
    if step.train is not None and isinstance(step.train.domains, dict) and len(domains) > 1:
        words.append(" : ".join(f"{domain} {share:g}" for domain, share in step.train.domains.items()))
    elif domains:
        words.append(" + ".join(domains))
    return ", ".join(words)


def learning(results: StudyResults) -> Table:
    """Every validation of the models trained from scratch: on the same batches, a row for each mark."""
    rows: dict[str, dict[str, list[float]]] = {}
    points = [(point, model.name) for model in results.models if model.kind == "whole" for point in model.curve]
    for point, name in sorted(points, key=lambda pair: pair[0].seen(results.unit)):
        rows.setdefault(count(point.seen(results.unit)), {}).setdefault(name, []).append(_mean_bits(point.bits))
    names = results.names("whole")
    cells = [
        [seen, *(over_seeds(by_name[name]).text() if name in by_name else "–" for name in names)]
        for seen, by_name in rows.items()
    ]
    return _table("learning", "Bits per byte during the training", [results.unit, *names], cells)


def cost(results: StudyResults) -> Table:
    """The size of each model and the cost of its training: FLOPs and wall clock."""
    rows = []
    kinds: tuple[Role, ...] = ("path", "composed", "whole", "given", "variant", "average", "distilled")
    for kind in kinds:
        for name in results.names(kind):
            models = results.of(name, kind)
            first, took = models[0], _seconds(models)
            walls = [m.wall_seconds for m in models]
            sizes = (first.parameters, first.active_parameters, first.flops_per_token)
            speed = (
                count(round(first.tokens / took)) if took and kind != "average" else "–"
            )  # an average is not trained
            wall = duration(sum(walls) / len(walls)) if all(walls) else "–"
            rows.append([name, *(f"{size:,}" for size in sizes), speed, duration(took) if took else "–", wall])
    columns = ["model", "parameters", "active", "FLOPs per token", "tokens/s", "training", "wall clock"]
    return _table("cost", "Size and speed", columns, rows)


def training_time(results: StudyResults) -> Table:
    """PaPaformer's Table 4: with paths trained one after another, and in parallel."""
    rows = []
    for name in results.names("path"):
        took = _seconds(results.of(name, "path"))
        rows.append([name, duration(took), "–", duration(took)])
    for name in results.names("composed"):
        composed = results.of(name, "composed")
        second = _seconds(composed)
        spent = {
            part: _seconds(results.of(part)) for part in dict.fromkeys(m.name for m in results.before(composed[0]))
        }
        apart = " + ".join(map(duration, spent.values()))
        rows.append([name, f"({apart})", duration(second), duration(sum(spent.values()) + second)])
        study = results.study
        lines = [[*study.before(part), part] for part in study.steps[name].reads]
        first = max(sum(spent[one] for one in line) for line in lines)
        rows.append([f"{name}, paths in parallel", duration(first), duration(second), duration(first + second)])
    for name in results.names("whole"):
        took = _seconds(results.of(name, "whole"))
        rows.append([name, "–", duration(took), duration(took)])
    return _table("training-time", "Training time", ["model", "stage 1", "stage 2", "total"], rows)


def inactive_paths(results: StudyResults) -> Table:
    """The cost of withdrawing a path from a composed model."""
    rows = []
    for name in results.names("composed"):
        models = results.of(name, "composed")
        rows.append([name, "none", *(over_seeds([m.bits[d] for m in models]).text() for d in results.domains)])
        for path in models[0].silenced:
            costs = [
                _change(over_seeds([m.silenced[path][d] - m.bits[d] for m in models]).mean) for d in results.domains
            ]
            rows.append([name, path, *costs])
    title = "Bits per byte with every path active, and the change when one is inactive"
    return _table("silent-paths", title, ["model", "inactive", *results.domains], rows)


def _table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Table:
    return Table(columns, rows, name=f"tables/{name}", title=title, keep=1)


def kind_label(kind: Role) -> str:
    """A kind of model in the words of tables."""
    return "from scratch" if kind == "whole" else kind


def _change(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _spread_change(changes: list[float]) -> str:
    spread = over_seeds(changes)
    return _change(spread.mean) + ("" if spread.deviation is None else f" ± {spread.deviation:.3f}")


def _mean_bits(bits: Bits) -> float:
    return sum(bits.values()) / len(bits)


def _seconds(models: list[ModelResult]) -> float:
    return sum(m.seconds for m in models) / len(models)
