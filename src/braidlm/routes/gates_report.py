"""What gates do, as tables, plots and a section of the page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from braidlm.core.report import figures
from braidlm.core.report.page import Page
from braidlm.routes.gates import ModelGates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS, SIZES = "gate_activations", "gate_sizes"
"""The names of the figures."""
FILE_COLUMNS = ("layer", "activation", "activation_without", "mean", "mean_without", "relative", "gain")
"""Of the file of all gates."""


def gate_columns(model: ModelGates) -> list[str]:
    """The headings of a table of one model's gates."""
    return ["layer", "size", "without", "mean", "without", "gate/output", *_domains(model), "gain"]


def gate_rows(model: ModelGates) -> list[list[str]]:
    """A row for each gate."""
    return [
        [
            str(one.layer),
            *(f"{value:.3g}" for value in (one.activation, one.activation_without, one.mean, one.mean_without)),
            _share(one.relative),
            *(_share(one.by_domain[domain]) for domain in _domains(model)),
            f"{one.gain:.3g}",
        ]
        for one in model.layers
    ]


def file_rows(model: ModelGates) -> Iterator[tuple[Any, ...]]:
    """For the file of all gates."""
    for one in model.layers:
        yield tuple(getattr(one, name) for name in FILE_COLUMNS)


def domain_rows(model: ModelGates) -> Iterator[tuple[Any, ...]]:
    """For the file of gates by domain: layer, domain, and how large the gate's output is there."""
    for one in model.layers:
        yield from ((one.layer, domain, share) for domain, share in one.by_domain.items())


def gate_figures(models: Sequence[ModelGates]) -> dict[str, "Figure"]:
    """Per layer: the size of activations with and without the gate, and the gate's output beside the layer's."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    sizes: dict[str, tuple[list[float], list[float]]] = {}
    for model in models:
        layers = [float(one.layer) for one in model.layers]
        name = f"{model.name}, " if len(models) > 1 else ""
        lines[f"{name}with gates"] = layers, [one.activation for one in model.layers]
        lines[f"{name}without"] = layers, [one.activation_without for one in model.layers]
        shown = _domains(model) if len(models) == 1 else []
        for domain in shown:
            sizes[domain] = layers, [one.by_domain[domain] for one in model.layers]
        if not shown:
            sizes[model.name] = layers, [one.relative for one in model.layers]
    return {
        ACTIVATIONS: figures.line_chart(lines, "layer", "mean size of activations"),
        SIZES: figures.line_chart(sizes, "layer", "gate's output / layer's output"),
    }


def gates_page(models: Sequence[ModelGates], drawn: Mapping[str, "Figure"], back: str = "") -> Page:
    """The page of models that have gates and nothing to choose between."""
    names = [model.name for model in models]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    page = Page("What gates do", f"The gated layers of {listed}")
    if back:
        page.links({"Back to the report": back})
    add_gates(page, models, drawn)
    return page


def add_gates(page: Page, models: Sequence[ModelGates], drawn: Mapping[str, "Figure"]) -> None:
    """What the gates of each model do, as plots and tables."""
    page.text(
        "A gate adds something of a layer's input to the layer's output. Activations are the numbers of the stream "
        "after a layer, over all tokens that were read: their mean size (without signs), and their mean, each with the "
        "layer's gate and without it."
    )
    page.figure(
        figures.to_svg(drawn[ACTIVATIONS]),
        "The mean size of activations after each gated layer, with its gate and without.",
    )
    page.figure(
        figures.to_svg(drawn[SIZES]),
        "How far gates have moved from zero: the norm of what the gate adds, as a share of the norm of what the layer "
        "gives without it, mean over tokens.",
    )
    for model in models:
        if len(models) > 1:
            page.heading(model.name, 3)
        for finding in model.findings:
            page.text(f"{finding[:1].upper()}{finding[1:]}.")
        caption = f"{len(model.layers)} gates ({model.kind}), {model.tokens:,} tokens, `{model.folder}`"
        page.table(gate_columns(model), gate_rows(model), caption)
    page.text(
        "Gain is by what factor a gate scales a random input, in the root mean square: of a scalar gate, the scalar's "
        "size. A bias is not part of it."
    )


def _domains(model: ModelGates) -> list[str]:
    """Where there is only one, it is the same as all."""
    domains = list(model.layers[0].by_domain) if model.layers else []
    return domains if len(domains) > 1 else []


def _share(share: float) -> str:
    return f"{share:.2%}" if share == 0 or share >= 0.0001 else f"{share:.2g}"
