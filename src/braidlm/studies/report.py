"""`braid train STUDY`: run a study, measure its models and write the report."""

import json
from pathlib import Path

from braidlm.core import console
from braidlm.core.files import write_json
from braidlm.core.report import figures
from braidlm.core.report.drawing import draw
from braidlm.core.report.page import Page
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
from braidlm.studies.results import ROUTES, StudyResults, measure, study_routes
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
    all_tables = tables(results)
    for table in all_tables:
        console.show("")
        console.table(table.columns, table.rows, title=table.title, keep=1)
        table.write(folder / "tables")
    write_json(folder / "results.json", results.as_dict())
    page = Page(results.study.name, _subtitle(results))
    for table in all_tables:
        page.heading(table.title)
        page.table(table.columns, table.rows)
        if table.name == ("bits-per-byte" if results.names("path") else "learning"):
            _curves(page, results, folder)
        if table.name == "bits-per-byte" and joins_models_of_two_domains(results):
            _plane(page, results, folder)
        if table.name == "models" and results.names("average"):
            page.text(AVERAGES)
        if table.name == "variants":
            _variants(page, results, folder)
    if routed is not None:
        _routing(page, routed, folder)
    page.heading("The study")
    page.code(json.dumps(encode(results.study), indent=2), summary="Everything about this study")
    page.write(folder / "report.html")
    console.say(f"Report: {folder / 'report.html'}")
    return folder / "report.html"


def _subtitle(results: StudyResults) -> str:
    if results.names("path"):
        return WITH_PATHS
    if results.names("average"):
        return WITH_AVERAGES
    return WITH_VARIANTS if results.names("variant") else WITHOUT_PATHS


def _plane(page: Page, results: StudyResults, folder: Path) -> None:
    """Every model on both domains."""
    chart = plane_chart(results)
    figures.save_png(chart, folder / f"{'-'.join(results.domains)}.png")
    page.figure(figures.to_svg(chart), f"{LOWER_LEFT}{_means(results)}")


def _means(results: StudyResults) -> str:
    """What is said below a chart of several seeds."""
    seeds = len(results.study.seeds)
    return "" if seeds == 1 else f" Means of {seeds} seeds."


def _variants(page: Page, results: StudyResults, folder: Path) -> None:
    """The first domain, which is the base's, against each that variants are trained on; then the series."""
    means = _means(results)
    old, *others = results.domains
    for new in [] if joins_models_of_two_domains(results) else others:  # the plane has the variants too
        if (chart := trade_chart(results, old, new)) is not None:
            figures.save_png(chart, folder / f"{old}-{new}.png")
            page.figure(figures.to_svg(chart), f"{LOWER_LEFT}{means}")
    for domain in results.domains:
        if (chart := series_chart(results, domain)) is not None:
            figures.save_png(chart, folder / f"{domain}-parameters.png")
            page.figure(figures.to_svg(chart), f"Held-out {domain} against the size of the model.{means}")


def _routing(page: Page, routed: RoutingReport, folder: Path) -> None:
    page.heading("Who goes where")
    chart = draw(share_chart(routed))
    figures.save_png(chart, folder / "routes.png")
    page.figure(figures.to_svg(chart), "Held-out documents of each domain.")
    page.links({"Every layer, and texts token by token": f"{ROUTES}/{ROUTES_PAGE}.html"})
    for model in routed.models:
        for sentence in (*verdicts(model), *model.findings):
            page.text(f"{model.name}: {sentence}")


def _curves(page: Page, results: StudyResults, folder: Path) -> None:
    """Of the first seed, one chart per domain."""
    for domain in results.domains:
        if (chart := learning_chart(results, domain)) is not None:
            figures.save_png(chart, folder / f"{domain}.png")
            page.figure(
                figures.to_svg(chart), f"Held-out {domain} during the training (seed {results.study.seeds[0]})."
            )
