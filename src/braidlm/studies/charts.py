"""The charts of a study's pages: one colour for each model and one scale of bits, throughout."""

import math
from collections.abc import Iterable, Mapping, Sequence

from braidlm.core.report.charts import Bars, Lines, Points
from braidlm.core.report.figure_style import COLOURS, INK
from braidlm.studies.results import Bits, ModelResult, StudyResults, over_seeds
from braidlm.studies.study import Role

NO_LEVELS: Mapping[str, float] = {}
BAR_BITS = 1.0
"""The end of the scale of bars in bits per byte."""


def model_colours(results: StudyResults) -> dict[str, str]:
    """The colour of each model; paths come first, which gives them those that routing reports have for them."""
    kinds: tuple[Role, ...] = ("path", "composed", "whole", "variant", "distilled", "average")
    names = [name for kind in kinds for name in results.names(kind)]
    return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}


def learning_chart(results: StudyResults, domain: str, levels: Mapping[str, float] = NO_LEVELS) -> Lines | None:
    """How the first seed's models learned a domain; a composed model begins after the tokens of what it is made of.

    None if there was no validation.
    """
    unit, colours = results.unit, model_colours(results)
    models = [m for m in results.models if m.seed == results.study.seeds[0]]
    series: dict[str, tuple[list[float], list[float]]] = {}
    series_colours = {}
    reached = [bits for m in models for point in m.curve for bits in point.bits.values()]
    for model in models:
        points = [(point.seen(unit), point.bits[domain]) for point in model.curve if domain in point.bits]
        before = results.before(model) if model.kind == "composed" else []
        shift = sum(part.curve[-1].seen(unit) for part in before if part.curve)
        if points:
            label = f"{model.name} (path)" if model.kind == "path" else model.name
            series[label] = ([seen + shift for seen, _ in points], [bits for _, bits in points])
            series_colours[label] = colours[model.name]
    if not series:
        return None
    return Lines(
        series,
        f"{unit} seen, those of the paths included" if results.names("composed") else f"{unit} seen",
        f"bits per byte, {domain}",
        levels=levels,
        log_x=len(results.study.validation.every.parts) > 1,
        log_y=True,
        colours=series_colours,
        y_limits=curve_limits([*reached, *levels.values()]),
    )


def joins_models_of_two_domains(results: StudyResults) -> bool:
    """Whether a plane shows all that a study is about."""
    return len(results.domains) == 2 and bool(results.names("composed", "average"))


def plane_chart(results: StudyResults) -> Points:
    """What every model reaches on both domains of a study: a point for each."""
    points = {name: _bits_on(results, name, results.domains) for name in results.names()}
    first, second = (f"bits per byte, {domain}" for domain in results.domains)
    return Points(points, first, second, model_colours(results), log=True)


def trade_chart(results: StudyResults, old: str, new: str) -> Points | None:
    """What variants that were trained on a new domain keep of the old one: a point for each, and one for the base.

    None if there are none.
    """
    study = results.study
    variants = [n for n in results.names("variant") if new in study.domains_of(n)]
    bases = dict.fromkeys(results.base_of(results.of(name)[0]).name for name in variants)
    points = {name: _bits_on(results, name, (old, new)) for name in (*bases, *variants)}
    if not points:
        return None
    return Points(points, f"bits per byte, {old}", f"bits per byte, {new}")


def _bits_on(results: StudyResults, name: str, domains: Sequence[str]) -> tuple[float, float]:
    """The bits per byte of a model on two domains, over its seeds."""
    first, second = (over_seeds([m.bits[domain] for m in results.of(name)]).mean for domain in domains)
    return first, second


def series_chart(results: StudyResults, domain: str) -> Lines | None:
    """Bits per byte against the share of the base's parameters, a line for each series; None if there is none."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in results.names("variant"):
        series, models = results.study.steps[name].series, results.of(name)
        own, base = models[0].parameters, results.base_of(models[0]).parameters
        if series is not None and own and base:
            lines.setdefault(series, []).append((100 * own / base, over_seeds([m.bits[domain] for m in models]).mean))
    if not lines:
        return None
    ordered = {series: sorted(points) for series, points in lines.items()}
    return Lines(
        {series: ([x for x, _ in points], [y for _, y in points]) for series, points in ordered.items()},
        "parameters, % of the base",
        f"bits per byte, {domain}",
    )


def comparison_chart(results: StudyResults, models: list[ModelResult], ngrams: Mapping[str, Bits]) -> Bars:
    """Bits per byte of these models and n-gram models as bars, a group for each domain; a path on its own alone."""
    bars: dict[str, dict[str, float]] = {}
    for domain in results.domains:
        own = [m for m in models if m.kind != "path" or results.study.domains_of(m.name) == [domain]]
        bars[domain] = {m.name: m.bits[domain] for m in own} | {name: bits[domain] for name, bits in ngrams.items()}
    colours = model_colours(results) | dict.fromkeys(ngrams, INK)
    limit = bar_limit(bits for group in bars.values() for bits in group.values())
    return Bars(bars, "bits per byte (lower is better)", digits=3, colours=colours, limit=limit)


def curve_limits(bits: Iterable[float]) -> tuple[float, float]:
    """The scale of all learning curves: whole powers of two around them, so that most runs of a study have the same."""
    powers = [math.log2(value) for value in bits if math.isfinite(value) and value > 0] or [0.0]
    low = math.floor(min(powers))
    return 2.0**low, 2.0 ** max(math.ceil(max(powers)), low + 1)


def bar_limit(bits: Iterable[float]) -> float:
    """The end of the scale of all bars, doubled until they fit; a tenth is kept for the number after a bar."""
    limit, largest = BAR_BITS, max((value for value in bits if math.isfinite(value)), default=0.0)
    while largest > 0.9 * limit:
        limit *= 2
    return limit
