"""What gates do, as charts, tables and a section of a report."""

from collections.abc import Sequence

from braidlm.core.report.charts import Lines
from braidlm.core.report.report import Report, Table
from braidlm.inspection.gates import ModelGates


def gate_table(model: ModelGates) -> Table:
    """A row for each gate of a model."""
    domains = _domains(model)
    rows = [
        [
            str(one.layer),
            *(f"{value:.3g}" for value in (one.activation, one.activation_without, one.mean, one.mean_without)),
            *(_share(share) for share in (one.relative, *(one.by_domain[domain] for domain in domains))),
            f"{one.gain:.3g}",
        ]
        for one in model.layers
    ]
    columns = ["layer", "size", "without", "mean", "without", "gate/output", *domains, "gain"]
    caption = f"{len(model.layers)} gates ({model.kind}), {model.tokens:,} tokens, `{model.folder}`"
    return Table(columns, rows, caption)


def add_gates(report: Report, models: Sequence[ModelGates]) -> None:
    """What the gates of each model do."""
    report.text(
        "A gate adds something of a layer's input to the layer's output. Activations are the numbers of the stream "
        "after a layer, over all tokens that were read: their mean size (without signs), and their mean, each with the "
        "layer's gate and without it."
    )
    activations, sizes = _charts(models)
    report.chart(
        activations,
        "The mean size of activations after each gated layer, with its gate and without.",
        name="gate_activations",
    )
    report.chart(
        sizes,
        "How far gates have moved from zero: the norm of what the gate adds, as a share of the norm of what the layer "
        "gives without it, mean over tokens.",
        name="gate_sizes",
    )
    for model in models:
        if len(models) > 1:
            report.heading(model.name, 3)
        for finding in model.findings:
            report.text(f"{finding[:1].upper()}{finding[1:]}.")
        report.table(gate_table(model))
    report.text(
        "Gain is by what factor a gate scales a random input, in the root mean square: of a scalar gate, the scalar's "
        "size. A bias is not part of it."
    )


def _charts(models: Sequence[ModelGates]) -> tuple[Lines, Lines]:
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
    return (
        Lines(lines, "layer", "mean size of activations"),
        Lines(sizes, "layer", "gate's output / layer's output"),
    )


def _domains(model: ModelGates) -> list[str]:
    """The domains of the texts; a single one is left out, since it has what all texts have."""
    domains = list(model.layers[0].by_domain) if model.layers else []
    return domains if len(domains) > 1 else []


def _share(share: float) -> str:
    return f"{share:.2%}" if share == 0 or share >= 0.0001 else f"{share:.2g}"
