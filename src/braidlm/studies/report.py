"""`braid train STUDY`: run a study, measure its models and write the report: one colour for each model throughout."""

import json
from collections.abc import Mapping, Sequence
from statistics import mean

from braidlm.core import console
from braidlm.core.jobs import open_jobs
from braidlm.core.report.rendering import show_report, write
from braidlm.core.report.report import COLOURS, INK, Bars, Lines, Points, Report, listed
from braidlm.core.report.verdicts import ranking
from braidlm.data.loading.open_data import open_data
from braidlm.inspection.results import RoutingReport, share_chart, verdicts
from braidlm.inspection.routes_report import PAGE as ROUTES_PAGE
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import load_study
from braidlm.studies.measure import ROUTES, Scorer, measure, study_routes
from braidlm.studies.results import Bits, ModelResult, StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study import Role, Study
from braidlm.studies.tables import learning, tables

BEFORE = (
    "What was seen is told apart: by the models that a model is made of, and by itself. Times are its own. An average "
    "costs what its members cost: FLOPs and time are theirs together, and they can be trained at the same time."
)
ROUTES_LINK = {"Every layer, and texts token by token": f"{ROUTES}/{ROUTES_PAGE}.html"}
LOWER_LEFT = "Nearer to the lower left is better on both."
SUBTITLES: dict[Role, str] = {
    "path": "Paths trained apart and composed, beside models trained from scratch",
    "average": "Models trained apart, and averages of their probabilities",
    "variant": "What edits and further training make of a trained model",
}
"""What a study is about, by the first of these kinds of models that it has."""


def study(
    recipe: str | Study,
    overrides: list[str] | None = None,
    device: str | None = None,
    fresh: bool = False,
    cluster: str | None = None,
) -> StudyResults:
    """Run a study (a recipe's name or file) and write its tables, results.json and report.html into its folder.

    The same call again resumes where it was stopped, or renders what is there; `fresh` starts over. With `cluster`
    (`ray` or `ray:ADDRESS`) its steps run on the nodes of a Ray cluster.
    """
    loaded = recipe if isinstance(recipe, Study) else load_study(str(recipe), overrides)
    with open_jobs(cluster, loaded.folder, device) as jobs:
        models = run_study(loaded, device, fresh, jobs=jobs, score=Scorer(loaded, device).score)
        results = measure(loaded, models, device, jobs)
    with console.silence():  # all of it is prepared
        data = open_data(loaded.data_config, loaded.validation.half)
    routed = study_routes(results, data, loaded.folder / ROUTES)
    for table in tables(results):
        console.show("")
        show_report(table)
    console.say(f"Report: {write(study_report(results, routed), loaded.folder, 'report')}")
    return results


def study_report(results: StudyResults, routed: RoutingReport | None) -> Report:
    """The tables and charts of a study."""
    kinds = (text for kind, text in SUBTITLES.items() if results.names(kind))
    subtitle = next(kinds, "Models trained from scratch on the same batches")
    report = Report(results.study.name, subtitle, data={"results": results.as_dict()})
    names = [n for n in results.names() if n not in results.names("path")] or results.names("path")
    bits = {name: [mean(m.bits.values()) for m in results.of(name)] for name in names}
    on = f"bits per byte on held-out {listed(results.domains)}"
    report.verdict = ranking(bits, "models", on if len(results.domains) == 1 else f"mean {on}")
    seeds = len(results.study.seeds)
    means = "" if seeds == 1 else f" Means of {seeds} seeds."
    for table in tables(results):
        report.heading(table.title).table(table)
        name = table.name.removeprefix("tables/")
        if name == "bits-per-byte":
            for domain in results.domains:
                if (chart := learning_chart(results, domain)) is not None:
                    seed = results.study.seeds[0]
                    report.chart(chart, f"Held-out {domain} during the training (seed {seed}).", domain)
        if name == "bits-per-byte" and joins_models_of_two_domains(results):
            report.chart(plane_chart(results), f"{LOWER_LEFT}{means}", "-".join(results.domains))
        if name == "cost" and any(map(results.before, results.models)):
            report.text(BEFORE)
        if name == "variants":
            _add_variants(report, results, means)
    if results.names("whole") and any(len(model.curve) > 1 for model in results.models):
        report.tables.append(learning(results))
    if routed is not None:
        add_routes(report.heading("Who goes where"), routed, "Held-out documents of each domain.")
    report.heading("The study")
    return report.code(
        json.dumps(encode(results.study), indent=2, ensure_ascii=False), summary="Everything about this study"
    )


def add_routes(report: Report, routed: RoutingReport, caption: str) -> None:
    """Where tokens go, in a picture and in sentences; of several models each sentence names its model."""
    report.chart(share_chart(routed), caption, "routes")
    for model in routed.models:
        for sentence in (*verdicts(model), *model.findings):
            report.text(f"{model.name}: {sentence}" if len(routed.models) > 1 else sentence)
    report.links(ROUTES_LINK)


def _add_variants(report: Report, results: StudyResults, means: str) -> None:
    """What variants keep of the first domain, which is the base's, against each that they are trained on: a point for
    each, and one for the base; then the series."""
    old, *others = results.domains
    for new in [] if joins_models_of_two_domains(results) else others:  # the plane has the variants too
        variants = [name for name in results.names("variant") if new in results.study.domains_of(name)]
        bases = dict.fromkeys(results.base_of(results.of(name)[0]).name for name in variants)
        points = {name: _bits_on(results, name, (old, new)) for name in (*bases, *variants)}
        if points:
            chart = Points(points, f"bits per byte, {old}", f"bits per byte, {new}")
            report.chart(chart, f"{LOWER_LEFT}{means}", f"{old}-{new}")
    for domain in results.domains:
        if (series := series_chart(results, domain)) is not None:
            report.chart(series, f"Held-out {domain} against the size of the model.{means}", f"{domain}-parameters")


def model_colours(results: StudyResults) -> dict[str, str]:
    """The colour of each model; paths come first, which gives them those that routing reports have for them."""
    kinds: tuple[Role, ...] = ("path", "composed", "whole", "variant", "distilled", "average")
    names = [name for kind in kinds for name in results.names(kind)]
    return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}


def learning_chart(results: StudyResults, domain: str, levels: Mapping[str, float] | None = None) -> Lines | None:
    """How the first seed's models learned a domain; a model that began with others begins after the tokens that these
    saw. None if there was one validation at most."""
    unit, colours = results.unit, model_colours(results)
    series: dict[str, tuple[list[float], list[float]]] = {}
    series_colours = {}
    for model in (m for m in results.models if m.seed == results.study.seeds[0]):
        points = [(point.seen(unit), point.bits[domain]) for point in model.curve if domain in point.bits]
        shift = sum(getattr(part, unit) for part in results.before(model))
        if points:
            label = f"{model.name} (path)" if model.kind == "path" else model.name
            series[label] = ([seen + shift for seen, _ in points], [bits for _, bits in points])
            series_colours[label] = colours[model.name]
    if all(len(seen) < 2 for seen, _ in series.values()):
        return None
    included = ["those before its own training included"] if results.names("variant") else []
    included = included or ["those of the paths included"] * bool(results.names("composed"))
    return Lines(
        series,
        ", ".join([f"{unit} seen", *included]),
        f"bits per byte, {domain}",
        levels=levels or {},
        log_x=len(results.study.validation.every.parts) > 1,
        log_y=True,
        colours=series_colours,
    )


def joins_models_of_two_domains(results: StudyResults) -> bool:
    """Whether a plane shows all that a study is about."""
    return len(results.domains) == 2 and bool(results.names("composed", "average"))


def plane_chart(results: StudyResults) -> Points:
    """What every model reaches on both domains of a study: a point for each."""
    points = {name: _bits_on(results, name, results.domains) for name in results.names()}
    first, second = (f"bits per byte, {domain}" for domain in results.domains)
    return Points(points, first, second, model_colours(results), log=True)


def _bits_on(results: StudyResults, name: str, domains: Sequence[str]) -> tuple[float, float]:
    """The bits per byte of a model on two domains, over its seeds."""
    first, second = (mean(m.bits[domain] for m in results.of(name)) for domain in domains)
    return first, second


def series_chart(results: StudyResults, domain: str) -> Lines | None:
    """Bits per byte against the share of the base's parameters, a line for each series; None if there is none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name in results.names("variant"):
        series, models = results.study.steps[name].series, results.of(name)
        own, base = models[0].parameters, results.base_of(models[0]).parameters
        if series is not None and own and base:
            points.setdefault(series, []).append((100 * own / base, mean(m.bits[domain] for m in models)))
    lines = {series: ([x for x, _ in sorted(own)], [y for _, y in sorted(own)]) for series, own in points.items()}
    return Lines(lines, "parameters, % of the base", f"bits per byte, {domain}") if lines else None


def comparison_chart(results: StudyResults, models: list[ModelResult], ngrams: Mapping[str, Bits]) -> Bars:
    """Bits per byte of these models and n-gram models as bars, a group for each domain; a path on its own alone."""
    bars: dict[str, dict[str, float]] = {}
    for domain in results.domains:
        own = [m for m in models if m.kind != "path" or results.study.domains_of(m.name) == [domain]]
        bars[domain] = {m.name: m.bits[domain] for m in own} | {name: bits[domain] for name, bits in ngrams.items()}
    colours = model_colours(results) | dict.fromkeys(ngrams, INK)
    return Bars(bars, "bits per byte (lower is better)", digits=3, colours=colours)
