"""The results of `braid routes` as plain data, for reports and programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from braidlm.core.report.html import notebook
from braidlm.core.report.report import Table
from braidlm.inspection.gates import ModelGates
from braidlm.inspection.gates_report import gate_table
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


@dataclass
class PromptRoutes:
    """The choices for one prompt."""

    name: str
    domain: str | None
    path: str | None
    """The path that is right for it."""
    chosen: list[str | None]
    """For each layer the choice at the last token, which predicts the next."""
    shares: list[dict[str, float] | None]
    """For each layer, over all its tokens."""
    view: TokenView

    @property
    def right(self) -> int | None:
        """In how many layers the right path was chosen; None where there is no right one."""
        return None if self.path is None else sum(choice == self.path for choice in self.chosen)

    @property
    def read(self) -> int:
        """How many layers can be read."""
        return sum(choice is not None for choice in self.chosen)


@dataclass
class DataRoutes:
    """The choices for one data set."""

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
    """One model."""

    name: str
    folder: str
    paths: list[str]
    active: list[str]
    """The paths that are in use."""
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
    """All models, side by side."""

    models: list[ModelRoutes]
    """The models with paths or experts."""
    gated: list[ModelGates] = field(default_factory=list)
    """The models with gates."""

    @property
    def choices(self) -> list[str]:
        """All choices of any model, paths first: the order of numbers and colours."""
        return list(dict.fromkeys([*self._paths, *self._choices]))

    @property
    def most_choices(self) -> int:
        """The largest number of choices of a layer."""
        return max((len(layer.choices) for model in self.models for layer in model.layers), default=0)

    @property
    def no_paths(self) -> list[str]:
        """The choices that are neither path nor expert: combinations of paths."""
        combined = {name for model in self.models for layer in model.layers if layer.of_paths for name in layer.choices}
        return [choice for choice in self.choices if choice in combined and choice not in self._paths]

    @property
    def _paths(self) -> list[str]:
        return [path for model in self.models for path in model.paths]

    @property
    def _choices(self) -> list[str]:
        """In the order of the layers with the most choices, so that inserted modules come after all others."""
        layers = [layer for model in self.models for layer in model.layers]
        return [choice for layer in sorted(layers, key=lambda one: -len(one.choices)) for choice in layer.choices]

    def _repr_html_(self) -> str:
        """In a notebook: the share of every choice over all layers, what gates do, and what it means."""
        notes = [f"{model.name}: {text}" for model in self.models for text in (*verdicts(model), *model.findings)]
        tallies = self.models[0].tallies if self.models else []
        rows = [[tally.what, *row] for at, tally in enumerate(tallies) for row in share_table(self, at).rows]
        columns = ("over", "choice", *(model.name for model in self.models))
        tables = [notebook(Table(columns, rows), notes)] if rows or notes else []
        for gates in self.gated:
            found = [f"{gates.name}: {finding}" for finding in gates.findings]
            tables.append(notebook(gate_table(gates), found))
        return "".join(tables)

    def facts(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        return {
            "models": [asdict(m, dict_factory=_json) | {"verdicts": verdicts(m)} for m in self.models],
            "gates": [asdict(m) | {"findings": m.findings} for m in self.gated],
        }


def _json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {JSON_KEYS.get(name, name): value for name, value in fields}


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
    """What the numbers mean, a sentence or two for each tally."""
    return [sentence for tally in model.tallies if (sentence := _verdict(tally))]


def _verdict(tally: Tally) -> str:
    """Empty where the texts have no domains."""
    clauses = []
    if tally.accuracy is not None:
        clauses.append(
            f"{percent(tally.accuracy)} of {tally.decisions:,} decisions are for the path of the text's domain "
            f"({percent(tally.accuracy_by_chance)} by chance)"
        )
    if (best := tally.most_informative) is not None:
        if not any(layer.entropy for layer in tally.read):
            clauses.append("every layer does the same with every token, which says nothing about the text")
        else:
            subject = f"{best.layer} tells" if len(tally.read) == 1 else f"{best.layer} tells most,"
            clauses.append(
                f"{subject} {best.information:.2f} of the {best.domain_entropy:.2f} bits of the domain "
                f"({best.information_by_chance:.2f} by chance), {_meaning(tally)}"
            )
    return f"{capital(tally.what)}: {'; '.join(clauses)}." if clauses else ""


def _meaning(tally: Tally) -> str:
    """Whether the best layer is significant, its p-value corrected for the number of layers (Bonferroni)."""
    best = tally.most_informative
    assert best is not None
    assert best.p_value is not None
    if best.p_value * len(tally.read) > 0.05:
        return "which so few texts may give by chance"
    if (best.information or 0.0) > 0.5 * (best.domain_entropy or 0.0):
        return "so the path says much about what a text is"
    return "more than chance gives, and far from all"


def capital(text: str) -> str:
    """The text with a capital first letter."""
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
        never = [name for name in expected if load.get(name) == 0.0]
        return [f"{layer.name} never takes {_quoted(never)}"] if never else []
    if layer.read_by == "cosine" and len(expected) == 1:
        return []  # there is no other path to be closest to
    only = f" (and all texts are '{domains[0]}')" if len(domains) == 1 else ""
    few = _quoted(largest)
    if layer.top_k > 1:
        return [f"{layer.name} gives {percent(share)} of its picks to {few}{only}"]
    if layer.read_by != "cosine":
        return [f"{layer.name} sends {percent(share)} of tokens to {few}{only}"]
    return [f"{layer.name} is closest to {few} at {percent(share)} of tokens{only}"]


def _quoted(names: Sequence[str]) -> str:
    """'a', 'b' and 'c'."""
    *first, last = [f"'{name}'" for name in names]
    return f"{', '.join(first)} and {last}" if first else last
