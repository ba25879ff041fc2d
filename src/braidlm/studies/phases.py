"""What a study's recipe says of each kind of model: trained from scratch, as a path, composed, or a variant."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from braidlm.core.errors import BraidError
from braidlm.edits.composing.path_models import averages, check_no_layout, composing_joins
from braidlm.edits.edit import Edit, edits, load_edits
from braidlm.model.config.ranges import Layers, LayersOrZero, Positive, Range, Seed, Share
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode, encode
from braidlm.model.freezing import Freezable
from braidlm.training.amounts import Amount
from braidlm.training.features.distill.teachers import TopK

Text = Literal["all", "shared"]
"""What a model reads of its domains."""
Domains = list[str] | dict[str, Positive]
"""Domains by name, or with their shares of a batch: `{german: 4, english: 1}`."""


@dataclass(kw_only=True)
class Phase:
    """What one phase of a study does otherwise than the rest."""

    epochs: Positive | None = None
    """How often it sees its share of the data; by default the study's `epochs`."""
    budget: Amount | None = None
    """Instead of epochs, how much: `5M tokens`, `300 steps`."""
    training: dict[str, Any] = field(default_factory=dict)
    """Options of `training` that differ from the study's."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.budget is not None:
            raise BraidError("give either epochs or a budget")


@dataclass(kw_only=True)
class SeededPhase(Phase):
    """A phase that may be run with some seeds alone."""

    seeds: list[Seed] | None = None
    """The seeds that it is trained with; by default the study's."""


@dataclass
class WholeSpec(SeededPhase):
    """A model trained from scratch. An architecture alone, without `model`, is trained on every domain."""

    model: Any
    """The architecture."""
    domains: Domains | None = None
    """The domains that it is trained on, as a list or with their shares of a batch; by default all of them."""
    text: Text = "all"
    """Of each domain all text, or what the paths leave to the composed models: what owners share who keep the rest."""

    def to_shorthand(self) -> Any:
        """The architecture alone where nothing else is said."""
        own = {key: encode(value) for key, value in vars(self).items() if value not in (None, {}, "all")}
        return own if len(own) > 1 else own["model"]


@dataclass
class PathsSpec(SeededPhase):
    """The paths: one for each domain, trained apart."""

    model: Any
    """The architecture of a path."""
    share: Annotated[float, Range(above=0, below=1)] = 0.6
    """How much of its domain each path is trained on; composed models are trained on the rest."""


@dataclass
class ComposedSpec(Phase):
    """Options of one composed model."""

    join: Annotated[Choice, PartOf(composing_joins, "shared_linear")] = "shared_linear"  # type: ignore[assignment]
    """How the paths become one stream; or `mixture`, which leaves them as they are and learns their shares of the
    probabilities: with `freeze: [paths, embedding]` nothing else."""
    members: list[str] | None = None
    """What it is composed of: whole models, paths, or such models trained on (variants without edits); by default the
    paths."""
    layers: Layers | None = None
    """Parallel layers; by default as many as a path has blocks."""
    blocks: LayersOrZero = 1
    """Full-width blocks before and after the parallel layers."""
    start: Literal["mean", "random"] = "mean"
    """How joins and projections are initialised: to pass on the paths' outputs, or at random as in the paper."""
    freeze: list[Freezable] = field(default_factory=list)
    """Parts that keep their weights when the composed model is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_averaged:
            blocks, start = (None if self.blocks == 1 else self.blocks), (None if self.start == "mean" else self.start)
            check_no_layout(layers=self.layers, blocks=blocks, start=start)

    @property
    def is_averaged(self) -> bool:
        """Whether the paths stay whole models, of which only the probabilities meet."""
        return self.join.kind in averages


@dataclass
class VariantSpec(Phase):
    """A model made of a trained one: edited, then trained, or only one of the two."""

    start: str
    """What it is made of: a model of the study (a variant stands before those that are made of it), or the folder of
    another model."""
    edits: list[Any] = field(default_factory=list)
    """Edits in order, each with its options: `prune: {text: python, keep: 0.8}`. A `text` may be a domain's name."""
    domains: Domains = field(default_factory=list)
    """The domains that it is then trained on, as a list or with their shares of a batch: `{german: 4, english: 1}`.
    Without any it is not trained. Edits after the training are those of another variant, made of this one."""
    series: str | None = None
    """Variants of one series are a line in the plots of bits per byte against parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.edits and not self.domains:
            raise BraidError("nothing is done: give edits, domains to train on, or both")
        if not self.domains and (self.training or self.epochs is not None or self.budget is not None):
            raise BraidError("it is not trained: give the domains to train on")


@dataclass
class DistilledSpec(SeededPhase):
    """A model that learns the probabilities of an average beside text of the domains that its members know."""

    teacher: str
    """The average that it learns from."""
    model: Any = None
    """The architecture; by default that of the average's first member."""
    weight: Share = 0.5
    """The average's share of the loss; the rest is the text's."""
    temperature: Positive = 1.0
    """Divides the logits of both sides."""
    top_k: TopK | None = None
    """Store the average's most probable tokens of every position, this many, once for all seeds, and learn from those.
    By default the members run in every step."""
    text: Text = "all"
    """Of each domain all text, or what the paths leave to the composed models: then no owner shows the rest of it."""


@dataclass
class AverageSpec:
    """Models trained apart whose probabilities are averaged, as `braid compose --join average` does it.

    What needs no training is made so: equal shares, or those that follow the text (`posterior`).
    """

    members: list[str]
    """Models of the study: one with several seeds, or several, which may be trained on other domains. They are whole
    models, paths, or such models trained on: variants without edits."""
    seeds: Literal["all", "each"] = "all"
    """One average of the members of all seeds, or one for each seed."""
    join: Annotated[Choice, PartOf(composing_joins, "average")] = "average"  # type: ignore[assignment]
    """How the members are weighed: all alike (`average`), or each by how well it has predicted the text so far
    (`posterior`)."""

    def __post_init__(self) -> None:
        if self.join.kind not in averages or averages[self.join.kind].learned:
            raise BraidError(
                f"an average is not trained, and {self.join.kind} has to be: that is a composed model, "
                "`composed.NAME`, which may have `members` too"
            )


class EditStep(NamedTuple):
    """One edit with its options."""

    kind: str
    edit: Edit


def edit_step(step: Any, where: str) -> EditStep:
    """An edit as a recipe writes it, `insert` or `insert: {modules: 4}`, decoded strictly."""
    load_edits()
    if isinstance(step, str):
        step = {step: {}}
    if not isinstance(step, dict) or len(step) != 1:
        raise BraidError(f"{where}: expected one edit's name with its options, got {step!r}")
    ((kind, options),) = step.items()
    try:
        chosen = edits[kind]
    except BraidError as error:
        raise BraidError(f"{where}: {error.what}", todo=error.todo) from error
    return EditStep(kind, decode(chosen, options or {}, f"{where}.{kind}"))
