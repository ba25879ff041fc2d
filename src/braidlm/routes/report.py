"""What `braid routes` found: plain facts, for tables, pages and programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from braidlm.routes.collect import Layer
from braidlm.routes.tallies import Tally


@dataclass
class TokenView:
    """A text token by token."""

    tokens: list[str]
    """What each token writes; nothing for one that only begins a character."""
    chosen: list[list[str] | None]
    """For each layer the choice of each token, with top-k the one that counts most; None where a layer cannot be read.
    """
    served: list[list[dict[str, float]] | None] = field(default_factory=list)
    """For each layer all that serve each token, with their weights."""


@dataclass
class PromptRoutes:
    """Where one prompt goes."""

    name: str
    domain: str | None
    path: str | None
    """The path that is right for it."""
    chosen: list[str | None]
    """For each layer the choice at the last token: the one that makes the next."""
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
    """Where one data set goes."""

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
    heard: list[str]
    """The paths that are not silent."""
    domains: dict[str, str | None]
    """The path of each domain."""
    layers: list[Layer]
    prompts: list[PromptRoutes] = field(default_factory=list)
    data: list[DataRoutes] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    """Looked at in several ways: prompts at their last token, all their tokens, the data sets."""
    findings: list[str] = field(default_factory=list)
    """What stands out: layers that always choose the same, paths or experts never chosen."""
    notes: list[str] = field(default_factory=list)
    """What limits the reading."""


@dataclass
class RoutingReport:
    """All models, side by side."""

    models: list[ModelRoutes]

    @property
    def choices(self) -> list[str]:
        """Everything there is to choose in any model, paths first: the order of numbers and colours."""
        return list(dict.fromkeys([*self._paths, *self._choices]))

    @property
    def no_paths(self) -> list[str]:
        """The choices that are no path, and no expert either: combinations of paths."""
        combined = {name for model in self.models for layer in model.layers if layer.of_paths for name in layer.choices}
        return [choice for choice in self.choices if choice in combined and choice not in self._paths]

    @property
    def _paths(self) -> list[str]:
        return [path for model in self.models for path in model.paths]

    @property
    def _choices(self) -> list[str]:
        return [choice for model in self.models for layer in model.layers for choice in layer.choices]

    def facts(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        return {"models": [asdict(model) | {"verdicts": verdicts(model)} for model in self.models]}


def percent(share: float | None) -> str:
    """0.4834 as 48%, and never 100% or 0% for what is only nearly so."""
    if share is None:
        return "-"
    digits = 0 if share in (0.0, 1.0) or 0.005 <= share < 0.995 else 1
    return f"{min(max(share, 0.001), 0.999) if 0 < share < 1 else share:.{digits}%}"


def verdicts(model: ModelRoutes) -> list[str]:
    """What the numbers mean, a sentence or two for each way of looking."""
    return [sentence for tally in model.tallies if (sentence := _verdict(tally))]


def _verdict(tally: Tally) -> str:
    """Empty where the texts have no domains."""
    said = []
    if tally.accuracy is not None:
        said.append(
            f"{percent(tally.accuracy)} of {tally.decisions:,} decisions are for the path of the text's domain "
            f"({percent(tally.accuracy_by_chance)} by chance)"
        )
    if (best := tally.telling) is not None:
        if not any(layer.entropy for layer in tally.read):
            said.append("every layer does the same with every token, which says nothing about the text")
        else:
            most = f"{best.layer} tells" if len(tally.read) == 1 else f"{best.layer} tells most,"
            said.append(
                f"{most} {best.information:.2f} of the {best.domain_entropy:.2f} bits of the domain "
                f"({best.information_by_chance:.2f} by chance), {_meaning(tally)}"
            )
    return f"{capital(tally.what)}: {'; '.join(said)}." if said else ""


def _meaning(tally: Tally) -> str:
    """Whether the best layer is more than luck, which has as many chances as there are layers."""
    best = tally.telling
    assert best is not None
    assert best.luck is not None
    if best.luck * len(tally.read) > 0.05:
        return "no more than luck gives"
    if (best.information or 0.0) > 0.5 * (best.domain_entropy or 0.0):
        return "so the path says much about what a text is"
    return "more than luck gives, and far from all"


def capital(text: str) -> str:
    """The first letter large."""
    return text[:1].upper() + text[1:]


def degenerate(layer: Layer, load: dict[str, float], heard: Sequence[str], domains: Sequence[str]) -> list[str]:
    """What is odd about how often a layer picks its choices: a few have (almost) all, or a path or expert has none."""
    expected = heard if layer.of_paths else layer.choices
    if 1 < layer.top_k >= len(set(expected).intersection(layer.choices)):
        return []  # all of them serve every token
    most = sorted(load, key=lambda name: -load[name])[: layer.top_k]
    share = sum(load[name] for name in most)
    if share < 0.99:
        never = [name for name in expected if load.get(name) == 0.0]
        return [f"{layer.name} never takes {_quoted(never)}"] if never else []
    if layer.how == "cosine" and len(heard) == 1:
        return []  # nothing else can be heard
    only = f" (and all texts are '{domains[0]}')" if len(domains) == 1 else ""
    few = _quoted(most)
    if layer.top_k > 1:
        return [f"{layer.name} gives {percent(share)} of its picks to {few}{only}"]
    if layer.how == "router":
        return [f"{layer.name} sends {percent(share)} of tokens to {few}{only}"]
    return [f"{layer.name} is closest to {few} at {percent(share)} of tokens{only}"]


def _quoted(names: Sequence[str]) -> str:
    """'a', 'b' and 'c'."""
    *first, last = [f"'{name}'" for name in names]
    return f"{', '.join(first)} and {last}" if first else last
