"""`braid train STUDY`: run a study, measure its models and write the report."""

import json
from pathlib import Path

from braidlm.core import console
from braidlm.core.report.report import Report
from braidlm.core.report.text import show_report
from braidlm.core.report.write import write
from braidlm.data.loading.open_data import open_data
from braidlm.inspection.charts import share_chart
from braidlm.inspection.results import RoutingReport, verdicts
from braidlm.inspection.routes_report import PAGE as ROUTES_PAGE
from braidlm.model.config.strict import encode
from braidlm.studies.charts import (
    joins_models_of_two_domains,
    learning_chart,
    plane_chart,
    series_chart,
    trade_chart,
)
from braidlm.studies.decoding import load_study
from braidlm.studies.measure import ROUTES, measure, study_routes
from braidlm.studies.results import StudyResults
from braidlm.studies.running import run_study
from braidlm.studies.study import Study
from braidlm.studies.tables import tables

WITH_PATHS = "Paths trained apart and composed, beside models trained from scratch"
WITHOUT_PATHS = "Models trained from scratch on the same batches"
WITH_AVERAGES = "Models trained apart, and averages of their probabilities"
AVERAGES = (
    "An average costs what its members cost: FLOPs, words and time are theirs together, and they can be trained at the "
    "same time. The time of a composed model is also its paths'. A distilled model has its own, and its average comes "
    "before it."
)
ROUTES_LINK = {"Every layer, and texts token by token": f"{ROUTES}/{ROUTES_PAGE}.html"}
LOWER_LEFT = "Nearer to the lower left is better on both."
WITH_VARIANTS = "What edits and further training make of a trained model"


def study(
    recipe: str | Study, overrides: list[str] | None = None, device: str | None = None, fresh: bool = False
) -> StudyResults:
    """Run a study (a recipe's name or file) and write its tables, facts and `report.html` into its folder.

    The same call again resumes where it was stopped, or renders what is there; `fresh` starts over.
    """
    loaded = recipe if isinstance(recipe, Study) else load_study(str(recipe), overrides)
    results = measure(loaded, run_study(loaded, device, fresh), device)
    with console.silence():  # all of it is prepared
        data = open_data(loaded.data_config, loaded.validation.half)
    routed = study_routes(results, data, loaded.folder / ROUTES)
    write_report(results, routed, loaded.folder)
    return results


def write_report(results: StudyResults, routed: RoutingReport | None, folder: Path) -> Path:
    """Tables in the terminal, as Markdown and CSV; results.json; report.html with the curves."""
    for table in tables(results):
        console.show("")
        show_report(table)
    path = write(study_report(results, routed), folder, "report")
    console.say(f"Report: {path}")
    return path


def study_report(results: StudyResults, routed: RoutingReport | None) -> Report:
    """The tables and charts of a study."""
    report = Report(results.study.name, _subtitle(results), data={"results": results.as_dict()})
    curves_after = "bits-per-byte" if results.names("path") else "learning"
    for table in tables(results):
        report.heading(table.title).table(table)
        name = table.name.removeprefix("tables/")
        if name == curves_after:
            for domain in results.domains:
                if (chart := learning_chart(results, domain)) is not None:
                    seed = results.study.seeds[0]
                    report.chart(chart, f"Held-out {domain} during the training (seed {seed}).", domain)
        if name == "bits-per-byte" and joins_models_of_two_domains(results):
            report.chart(plane_chart(results), f"{LOWER_LEFT}{_means(results)}", "-".join(results.domains))
        if name == "models" and results.names("average"):
            report.text(AVERAGES)
        if name == "variants":
            _add_variants(report, results)
    if routed is not None:
        report.heading("Who goes where")
        report.chart(share_chart(routed), "Held-out documents of each domain.", "routes").links(ROUTES_LINK)
        for model in routed.models:
            for sentence in (*verdicts(model), *model.findings):
                report.text(f"{model.name}: {sentence}")
    report.heading("The study")
    return report.code(json.dumps(encode(results.study), indent=2), summary="Everything about this study")


def _subtitle(results: StudyResults) -> str:
    if results.names("path"):
        return WITH_PATHS
    if results.names("average"):
        return WITH_AVERAGES
    return WITH_VARIANTS if results.names("variant") else WITHOUT_PATHS


def _means(results: StudyResults) -> str:
    """What is said below a chart of several seeds."""
    seeds = len(results.study.seeds)
    return "" if seeds == 1 else f" Means of {seeds} seeds."


def _add_variants(report: Report, results: StudyResults) -> None:
    """The first domain, which is the base's, against each that variants are trained on; then the series."""
    means = _means(results)
    old, *others = results.domains
    for new in [] if joins_models_of_two_domains(results) else others:  # the plane has the variants too
        if (trade := trade_chart(results, old, new)) is not None:
            report.chart(trade, f"{LOWER_LEFT}{means}", f"{old}-{new}")
    for domain in results.domains:
        if (series := series_chart(results, domain)) is not None:
            report.chart(series, f"Held-out {domain} against the size of the model.{means}", f"{domain}-parameters")
