"""Where several choices serve a token: how evenly they are used."""

from collections.abc import Iterator

from braidlm.core.report.page import Page
from braidlm.routes.collect import Layer
from braidlm.routes.report import ModelRoutes, RoutingReport, capital, percent


def least_used(model: ModelRoutes) -> float | None:
    """Where several serve a token: the load of the choice with the least in any layer, as a share of an even one."""
    read = zip(model.layers, model.tallies[-1].layers, strict=True)
    least = [
        min(one.load[name] for name in _heard(model, layer)) * len(_heard(model, layer))
        for layer, one in read
        if one is not None and layer.top_k > 1
    ]
    return min(least, default=None)


def _heard(model: ModelRoutes, layer: Layer) -> list[str]:
    """The choices of a layer that can be taken."""
    return [name for name in layer.choices if not layer.of_paths or name in model.heard]


def add_loads(page: Page, report: RoutingReport) -> None:
    """Add the loads to a page: of each layer what is used most and least."""
    page.text(
        "Where several choices serve a token, load is a choice's share of all picks, and weight its share of what the "
        "router lets count. The picture shows weights."
    )
    columns = ["", "choices", "even load", "most used", "load", "weight", "least used", "load", "weight"]
    rows = [row for model in report.models for row in _load_rows(model, len(report.models) > 1)]
    page.table(columns, rows, f"{capital(report.models[0].tallies[-1].what)}; `shares.csv` has every choice.")


def _load_rows(model: ModelRoutes, several: bool) -> Iterator[list[str]]:
    for layer, one in zip(model.layers, model.tallies[-1].layers, strict=True):
        if one is not None and layer.top_k > 1:
            names = sorted(_heard(model, layer), key=lambda name: -one.load[name])
            ends = ((name, percent(one.load[name]), percent(one.weight[name])) for name in (names[0], names[-1]))
            number = f"{layer.top_k} of {len(layer.choices)}"
            label = f"{model.name}, {layer.label}" if several else layer.label
            yield [label, number, percent(1 / len(names)), *(cell for end in ends for cell in end)]
