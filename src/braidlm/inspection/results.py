"""The results of `braid routes` as plain data, for reports and programs, with their charts and the section on gates."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from braidlm.core.report.page import notebook
from braidlm.core.report.report import Bars, HeatMap, HeatMaps, Lines, Report, StackedShares, Table, listed
from braidlm.inspection.gates import ModelGates
from braidlm.inspection.layers import Layer
from braidlm.inspection.measures import LayerTally, Tally

PASSED_BY = "none"
"""Where a token has no choice, because it passes by the layer that would choose."""
JSON_KEYS = {"active": "heard", "read_by": "how", "p_value": "luck"}
"""Fields whose key in `--json` has another name, which programs rely on."""


@dataclass
class TokenView:
    """A text token by token."""

    tokens: list[str]
    """The text of each token; empty for one that only begins a character."""
    chosen: list[list[str] | None]
    """For each layer the choice of each token with the largest weight; None where a layer cannot be read."""
    served: list[list[dict[str, float]] | None] = field(default_factory=list)
    """For each layer all choices of each token, with their weights."""

    @classmethod
    def of(cls, tokens: list[str], served: list[list[dict[str, float]] | None]) -> "TokenView":
        """The view in which the first of the choices that serve a token is its choice."""
        chosen = [None if row is None else [next(iter(by), PASSED_BY) for by in row] for row in served]
        return cls(tokens, chosen, served)


@dataclass
class PromptRoutes:
    name: str
    domain: str | None
    path: str | None
    """The path that is right for it."""
    chosen: list[str | None]
    """For each layer the choice at the last token, which predicts the next."""
    shares: list[dict[str, float] | None]
    """For each layer, over all its tokens."""
    view: TokenView


@dataclass
class DataRoutes:
    name: str
    path: str | None
    documents: int
    tokens: int
    shares: list[dict[str, float] | None]
    """For each layer, over all tokens."""
    sample: TokenView
    """The beginning of the first document."""


@dataclass
class ModelRoutes:
    name: str
    folder: str
    paths: list[str]
    active: list[str]
    domains: dict[str, str | None]
    """The path of each domain."""
    layers: list[Layer]
    prompts: list[PromptRoutes] = field(default_factory=list)
    data: list[DataRoutes] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    """Over the last tokens of the prompts, over all their tokens, and over the data sets."""
    typical: list[dict[str, list[str]] | None] = field(default_factory=list)
    """For each layer the tokens that each choice is taken for most, beyond what its load and theirs would give."""
    findings: list[str] = field(default_factory=list)
    """What stands out: layers that always choose the same, paths or experts never chosen."""
    notes: list[str] = field(default_factory=list)
    """What limits the reading."""

    def read(self, at: int = -1) -> Iterator[tuple[Layer, LayerTally]]:
        """The layers that can be read, with what tally `at` has of them; the last tally has most tokens."""
        for layer, one in zip(self.layers, self.tallies[at].layers, strict=True):
            if one is not None:
                yield layer, one


@dataclass
class RoutingReport:
    models: list[ModelRoutes]
    """The models with paths or experts."""
    gated: list[ModelGates] = field(default_factory=list)
    note: str = ""
    """What is to be known of the texts."""

    @property
    def choices(self) -> list[str]:
        """All choices of any model, paths first: the order of numbers and colours."""
        paths = [path for model in self.models for path in model.paths]
        # Layers with the most choices come first, so that inserted modules come after all others.
        layers = sorted((layer for model in self.models for layer in model.layers), key=lambda one: -len(one.choices))
        return list(dict.fromkeys([*paths, *(choice for layer in layers for choice in layer.choices)]))

    @property
    def most_choices(self) -> int:
        """The largest number of choices of a layer."""
        return max((len(layer.choices) for model in self.models for layer in model.layers), default=0)

    @property
    def no_paths(self) -> list[str]:
        """The choices that are neither path nor expert: combinations of paths."""
        paths = {path for model in self.models for path in model.paths}
        combined = {name for model in self.models for layer in model.layers if layer.of_paths for name in layer.choices}
        return [choice for choice in self.choices if choice in combined - paths]

    def _repr_html_(self) -> str:
        """In a notebook: the share of every choice over all layers, what gates do, and what it means."""
        notes = [f"{model.name}: {text}" for model in self.models for text in (*verdicts(model), *model.findings)]
        tallies = self.models[0].tallies if self.models else []
        rows = [[tally.what, *row] for at, tally in enumerate(tallies) for row in share_table(self, at).rows]
        columns = ("over", "choice", *(model.name for model in self.models))
        tables = [notebook(Table(columns, rows), notes)] if rows or notes else []
        for gates in self.gated:
            tables.append(notebook(gate_table(gates), [f"{gates.name}: {finding}" for finding in gates.findings]))
        return "".join(tables)

    def facts(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        models = []
        for model in self.models:
            facts = asdict(model, dict_factory=lambda items: {JSON_KEYS.get(name, name): v for name, v in items})
            models.append(facts | {"verdicts": verdicts(model)})
        return {"models": models, "gates": [asdict(m) | {"findings": m.findings} for m in self.gated]}


def percent(share: float | None) -> str:
    """0.4834 as 48%, and never 100% or 0% for what is only nearly so."""
    if share is None:
        return "-"
    digits = 0 if share in (0.0, 1.0) or 0.005 <= share < 0.995 else 1
    return f"{min(max(share, 0.001), 0.999) if 0 < share < 1 else share:.{digits}%}"


def share_table(result: RoutingReport, at: int) -> Table:
    """The share of each choice in tally `at`, a column for each model; no rows where layers have different experts."""
    tallies = [model.tallies[at] for model in result.models]
    named = [name for name in result.choices if any(name in tally.shares for tally in tallies)]
    rows = [[name, *(percent(tally.shares.get(name)) for tally in tallies)] for name in named]
    if named and any(tally.accuracy is not None for tally in tallies):
        rows.append(["right", *(percent(tally.accuracy) for tally in tallies)])
        rows.append(["right by chance", *(percent(tally.accuracy_by_chance) for tally in tallies)])
    caption = f"What each choice has over all layers: {tallies[0].what}."
    return Table(["", *(model.name for model in result.models)], rows, caption)


def verdicts(model: ModelRoutes) -> list[str]:
    """What the numbers mean, a sentence or two for each tally; none where the texts have no domains."""
    sentences, labels = [], {layer.name: layer.label for layer in model.layers}
    for tally in model.tallies:
        clauses = []
        if tally.accuracy is not None:
            clauses.append(
                f"{percent(tally.accuracy)} of {tally.decisions:,} decisions are for the path of the text's domain "
                f"({percent(tally.accuracy_by_chance)} by chance)"
            )
        if (best := tally.most_informative) and not any(layer.entropy for layer in tally.read):
            clauses.append("every layer does the same with every token, which says nothing about the text")
        elif best:
            subject = f"{labels.get(best.layer, best.layer)} tells{' most,' * (len(tally.read) > 1)}"
            # The p-value is corrected for the number of layers (Bonferroni).
            if (best.p_value or 0.0) * len(tally.read) > 0.05:
                meaning = "which so few texts may give by chance"
            elif (best.information or 0.0) > 0.5 * (best.domain_entropy or 0.0):
                meaning = "so the path says much about what a text is"
            else:
                meaning = "more than chance gives, and far from all"
            clauses.append(
                f"{subject} {best.information:.2f} of the {best.domain_entropy:.2f} bits of the domain "
                f"({best.information_by_chance:.2f} by chance), {meaning}"
            )
        if clauses:
            sentences.append(f"{capital(tally.what)}: {'; '.join(clauses)}.")
    return sentences


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def degenerate(layer: Layer, load: dict[str, float], paths: Sequence[str], domains: Sequence[str]) -> list[str]:
    """What is degenerate in a layer's load: a few choices have (almost) all, or a path or expert has none."""
    # A combination of paths need not be taken.
    expected = [name for name in layer.active if not layer.of_paths or name in paths]
    if 1 < layer.top_k >= len(expected):
        return []  # every token takes all of them
    largest = sorted(load, key=lambda name: -load[name])[: layer.top_k]
    share = sum(load[name] for name in largest)
    if share < 0.99:
        never = [f"'{name}'" for name in expected if load.get(name) == 0.0]
        return [f"{layer.label} never takes {listed(never)}"] if never else []
    if layer.read_by == "cosine" and len(expected) == 1:
        return []  # there is no other path to be closest to
    only = f" (and all texts are '{domains[0]}')" if len(domains) == 1 else ""
    few = listed([f"'{name}'" for name in largest])
    if layer.top_k == 1 and layer.read_by == "cosine":
        return [f"{layer.label} is closest to {few} at {percent(share)} of tokens{only}"]
    sent = f"gives {percent(share)} of its picks" if layer.top_k > 1 else f"sends {percent(share)} of tokens"
    return [f"{layer.label} {sent} to {few}{only}"]


def load_chart(result: RoutingReport) -> HeatMaps:
    """For each model and each kind of layer, the load of every choice in every layer, domains side by side."""
    lines: list[list[HeatMap]] = []
    for model in result.models:
        kinds: dict[tuple[str, int], list[tuple[Layer, LayerTally]]] = {}
        for layer, one in model.read():
            kinds.setdefault((layer.part, len(layer.choices)), []).append((layer, one))
        for (part, size), layers in kinds.items():
            title = ", ".join(filter(None, (model.name if len(result.models) > 1 else "", part)))
            names = [name.removeprefix("expert_") for name in layers[0][0].choices]
            labels = [" ".join(layer.label.split()[1:2]) or layer.label for layer, _ in layers]  # `layer 2`, or `head`
            lines.append([])
            for domain in dict.fromkeys(domain for _, one in layers for domain in one.load_by_domain):
                loads = [[share * size for share in one.load_by_domain[domain].values()] for _, one in layers]
                lines[-1].append(HeatMap(f"{title}: {domain}" if title else domain, labels, names, loads))
    return HeatMaps(lines, "load, 1 is an even share")


def share_chart(result: RoutingReport) -> StackedShares:
    """For each layer and domain the weight of each choice, over all tokens; models side by side.

    Where a token takes one choice, the weight is how often it is taken.
    """
    panels: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for model in result.models:
        of_layers = ((layer.label, one.weight_by_domain.items()) for layer, one in model.read())
        panels[model.name] = {(label, domain): shares for label, weights in of_layers for domain, shares in weights}
    return StackedShares(panels, result.choices, result.no_paths)


def information_chart(result: RoutingReport) -> Bars | None:
    """For each layer and model, the bits that the choice gives about the domain; None without domains."""
    bits: dict[str, dict[str, float]] = {}
    for model in result.models:
        for layer, one in model.read():
            if one.information is not None:
                bits.setdefault(layer.label, {})[model.name] = one.information
    single = {at: next(iter(values.values())) for at, values in bits.items()} if len(result.models) == 1 else None
    return Bars(single or bits, f"bits about the domain, from {result.models[0].tallies[-1].what}") if bits else None


def gate_table(model: ModelGates) -> Table:
    """A row for each gate of a model."""
    domains, rows = _domains(model), []
    for one in model.layers:
        numbers = [one.activation, one.activation_without, one.mean, one.mean_without]
        parts = [one.relative, *(one.by_domain[domain] for domain in domains)]
        shown = [f"{part:.2%}" if part == 0 or part >= 0.0001 else f"{part:.2g}" for part in parts]
        rows.append([str(one.layer), *(f"{number:.3g}" for number in numbers), *shown, f"{one.gain:.3g}"])
    columns = ["layer", "size", "without", "mean", "without", "gate/output", *domains, "gain"]
    return Table(columns, rows, f"{len(model.layers)} gates ({model.kind}), {model.tokens:,} tokens, `{model.folder}`")


def add_gates(report: Report, models: Sequence[ModelGates]) -> None:
    """What the gates of each model do."""
    report.text(
        "A gate adds something of a layer's input to the layer's output. Activations are the numbers of the stream "
        "after a layer, over all tokens that were read: their mean size (without signs), and their mean, each with the "
        "layer's gate and without it."
    )
    lines: dict[str, tuple[list[float], list[float]]] = {}
    sizes: dict[str, tuple[list[float], list[float]]] = {}
    for model in models:
        layers = [float(one.layer) for one in model.layers]
        name = f"{model.name}, " if len(models) > 1 else ""
        lines[f"{name}with gates"] = layers, [one.activation for one in model.layers]
        lines[f"{name}without"] = layers, [one.activation_without for one in model.layers]
        domains = _domains(model) if len(models) == 1 else []
        by_domain = {domain: (layers, [one.by_domain[domain] for one in model.layers]) for domain in domains}
        sizes |= by_domain or {model.name: (layers, [one.relative for one in model.layers])}
    caption = "The mean size of activations after each gated layer, with its gate and without."
    report.chart(Lines(lines, "layer", "mean size of activations"), caption, name="gate_activations")
    caption = "How far gates have moved from zero: the norm of what the gate adds, as a share of the norm of what the "
    caption += "layer gives without it, mean over tokens."
    report.chart(Lines(sizes, "layer", "gate's output / layer's output"), caption, name="gate_sizes")
    for model in models:
        if len(models) > 1:
            report.heading(model.name, 3)
        for finding in model.findings:
            report.text(f"{capital(finding)}.")
        report.table(gate_table(model))
    report.text(
        "Gain is by what factor a gate scales a random input, in the root mean square: of a scalar gate, the scalar's "
        "size. A bias is not part of it."
    )


def _domains(model: ModelGates) -> list[str]:
    """The domains of the texts; a single one is left out, since it has what all texts have."""
    domains = list(model.layers[0].by_domain) if model.layers else []
    return domains if len(domains) > 1 else []
