"""The report as pictures: what each path has in each layer, and how much that tells about the domain."""

from typing import TYPE_CHECKING

from braidlm.core.report import figures
from braidlm.routes.report import ModelRoutes, RoutingReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pictures(report: RoutingReport) -> dict[str, "Figure"]:
    """Figures by name."""
    drawn = {"shares": share_figure(report)}
    if (told := information_figure(report)) is not None:
        drawn["information"] = told
    return drawn


def share_figure(report: RoutingReport) -> "Figure":
    """For each layer and domain, what each choice counts, over as many tokens as were looked at; models aside.

    Where one choice serves a token, that is how often it is taken.
    """
    panels = {model.name: _bars(model) for model in report.models}
    return figures.share_chart(panels, report.choices, report.no_paths)


def information_figure(report: RoutingReport) -> "Figure | None":
    """For each layer and model, the bits that the path taken tells about the domain; None without domains."""
    bits: dict[str, dict[str, float]] = {}
    for model in report.models:
        tally = model.tallies[-1]
        for layer, one in zip(model.layers, tally.layers, strict=True):
            if one is not None and one.information is not None:
                bits.setdefault(layer.label, {})[model.name] = one.information
    if not bits:
        return None
    label = f"bits about the domain, from {report.models[0].tallies[-1].what}"
    single = len(report.models) == 1
    return figures.bar_chart({at: next(iter(v.values())) for at, v in bits.items()} if single else bits, label)


def _bars(model: ModelRoutes) -> dict[tuple[str, str], dict[str, float]]:
    """The tally with most tokens is the last."""
    return {
        (layer.label, domain): shares
        for layer, one in zip(model.layers, model.tallies[-1].layers, strict=True)
        if one is not None
        for domain, shares in one.weight_by_domain.items()
    }
