"""The steps of a study: one class for each kind of step, with the keys that a recipe may give it."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from braidlm.core.errors import BraidError
from braidlm.edits.composing.path_models import MODULES, averages, check_no_layout, composing_joins
from braidlm.edits.edit import Edit, edits, load_edits
from braidlm.model.config.ranges import Layers, LayersOrZero, Positive, Seed, Share
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode, encode
from braidlm.training.amounts import Amount
from braidlm.training.features.distill.teachers import TopK

Text = Literal["all", "kept", "shared"]
"""What a training reads of its domains: everything, what their owners keep (the study's `kept`), or the rest."""
Domains = list[str] | dict[str, Positive]
"""Domains by name, or with their shares of a batch: `{german: 4, english: 1}`."""


@dataclass(kw_only=True)
class StepTraining:
    """The training of a step. All other keys are options of `training` that differ from the study's."""

    domains: Domains | None = None
    """The domains that are read, as a list or with their shares of a batch; by default all of them, and for a step
    that distils those that its teacher has read."""
    text: Text | dict[str, Text] = "all"
    """What is read of each domain; of some domains another part than of the others: `{code: shared}`, all of these."""
    epochs: Positive | None = None
    """How often that text is read; by default the study's `epochs`."""
    budget: Amount | None = None
    """Instead of epochs, how much is read: `5M tokens`, `300 steps`."""
    options: dict[str, Any] = field(init=False, default_factory=dict)
    """The other keys."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.budget is not None:
            raise BraidError("give either epochs or a budget")
        if self.domains is not None and not self.domains:
            raise BraidError("domains: name at least one")

    def to_shorthand(self) -> dict[str, Any]:
        """The plain data that a recipe has."""
        own = {key: encode(getattr(self, key)) for key in TRAINING_KEYS}
        return {key: value for key, value in own.items() if value not in (None, "all")} | self.options


TRAINING_KEYS = ("domains", "text", "epochs", "budget")


@dataclass(kw_only=True)
class Step:
    """One step of a study: it makes a model, once for each of its seeds."""

    kind: ClassVar[str]
    train: StepTraining | None = None
    """The training after the model is made; without it the model stays as it is made."""
    seeds: list[Seed] | None = None
    """The seeds that the step is done with; by default those of what it reads, or the study's."""
    gpus: Positive | None = None
    """GPUs that the step's training asks a cluster for; by default one where the cluster has any. Several jobs share a
    GPU where they ask for a part of it: `0.25`."""
    series: str | None = None
    """Steps of one series are a line in the plots of bits per byte against parameters."""
    made_of: ClassVar[str] = "of"
    """The key that names what the step is made of."""

    @property
    def reads(self) -> list[str]:
        """The names of the models that the step is made of."""
        named: str | list[str] | None = getattr(self, self.made_of)
        return [named] if isinstance(named, str) else named or []

    def to_shorthand(self) -> dict[str, Any]:
        """The keys that differ from their defaults."""
        return {key: encode(value) for key, value in vars(self).items() if value not in (None, [])}


@dataclass(kw_only=True)
class TrainStep(Step):
    """A model trained from scratch, or another model (`of`) trained on."""

    kind = "train"
    other_keys: ClassVar[tuple[str, ...]] = ("compose", "edit", "average", "distil")
    model: Any = None
    """The architecture, or the name of one among the study's `models`."""
    of: str | None = None
    """A step, or the folder of a model, that is trained on."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.of is None):
            raise BraidError("give either a `model` to train from scratch, or a model to train on: `of`")
        if self.of is not None and self.train is None:
            raise BraidError("nothing is done: give edits (`edit`), a training (`train`), or both")
        self.train = self.train or StepTraining()


@dataclass(kw_only=True)
class ComposeStep(Step):
    """Models that were trained apart, composed as the paths of one."""

    kind = made_of = "compose"
    compose: list[str]
    """The steps whose models become the paths, which have their names."""
    join: Annotated[Choice, PartOf(composing_joins, "shared_linear")] = "shared_linear"  # type: ignore[assignment]
    """How the paths become one stream; or `mixture`, which leaves them as they are and learns their shares of the
    probabilities: with `train: {freeze: [paths, embedding]}` nothing else; or `modules`, the modules that were inserted
    into one base, of which a training changes the routers alone."""
    layers: Layers | None = None
    """Parallel layers; by default as many as a path has blocks."""
    blocks: LayersOrZero = 1
    """Full-width blocks before and after the parallel layers."""
    start: Literal["mean", "random"] = "mean"
    """How joins and projections are initialised: to pass on the paths' outputs, or at random as in the paper."""

    def __post_init__(self) -> None:
        _check_members("compose", self.compose)
        if len(self.compose) < 2:
            raise BraidError("compose: name at least two")
        if self.keeps_models:
            blocks, start = (None if self.blocks == 1 else self.blocks), (None if self.start == "mean" else self.start)
            check_no_layout(layers=self.layers, blocks=blocks, start=start)

    @property
    def keeps_models(self) -> bool:
        """Whether there is no layout to choose: only probabilities meet, or modules of one base."""
        return self.join.kind in averages or self.join.kind == MODULES

    def options(self, seed: int) -> dict[str, Any]:
        """The options of `braid compose`."""
        layout: dict[str, Any] = {} if self.keeps_models else {"blocks": self.blocks, "start": self.start}
        layout |= {} if self.layers is None else {"layers": self.layers}
        return {"join": encode(self.join), "seed": seed} | layout


@dataclass(kw_only=True)
class EditStep(Step):
    """A model that edits are applied to, in order."""

    kind = "edit"
    edit: list[Any]
    """Edits, each with its options: `prune: {text: python, keep: 0.8}`. A `text` may be a domain's name."""
    of: str
    """A step, or the folder of a model, that is edited."""

    def __post_init__(self) -> None:
        if not self.edit:
            raise BraidError("edit: name at least one edit")


@dataclass(kw_only=True)
class AverageStep(Step):
    """Models trained apart whose probabilities are averaged, as `braid compose --join average` does it.

    What needs no training is made so: equal shares, or those that follow the text (`posterior`).
    """

    kind = made_of = "average"
    train: None = field(init=False, default=None)
    average: list[str]
    """Steps whose models are the members: one with several seeds, or several, which may read other domains."""
    seeds: Literal["all", "each"] = "all"  # type: ignore[assignment]
    """One average of the members of all seeds, or one for each seed."""
    join: Annotated[Choice, PartOf(composing_joins, "average")] = "average"  # type: ignore[assignment]
    """How the members are weighed: all alike (`average`), or each by how well it has predicted the text so far
    (`posterior`)."""

    def __post_init__(self) -> None:
        _check_members("average", self.average)
        if self.join.kind not in averages or averages[self.join.kind].learned:
            raise BraidError(
                f"an average is not trained, and {self.join.kind} has to be: write `compose` for `average`, and `train`"
            )

    def options(self, seed: int) -> dict[str, Any]:
        """The options of `braid compose`."""
        return {"join": encode(self.join)}


@dataclass
class Distillation:
    """What a model learns from another, beside text of the domains that the other has read."""

    teacher: str
    """The step whose probabilities are learned."""
    weight: Share = 0.5
    """The teacher's share of the loss; the rest is the text's."""
    temperature: Positive = 1.0
    """Divides the logits of both sides."""
    top_k: TopK | None = None
    """Store the teacher's most probable tokens of every position, this many, once for all seeds, and learn from those.
    By default the teacher runs in every step."""


@dataclass(kw_only=True)
class DistilStep(Step):
    """A model trained from scratch that learns from another model."""

    kind = "distil"
    distil: Distillation
    """What is learned, and from which step."""
    model: Any = None
    """The architecture, or the name of one among the study's `models`; by default the teacher's, and of an average
    that of its first member."""

    def __post_init__(self) -> None:
        self.train = self.train or StepTraining()

    @property
    def reads(self) -> list[str]:
        return [self.distil.teacher]


KINDS: dict[str, type[Step]] = {one.kind: one for one in (ComposeStep, EditStep, AverageStep, DistilStep)}
"""Kinds of steps by the key that tells them; a step without any of these keys is a `train` step."""


def decode_step(data: Any, where: str) -> Step:
    """A step as a recipe writes it, decoded strictly."""
    if isinstance(data, Step):
        return data
    if not isinstance(data, dict):
        raise BraidError(f"{where}: expected a step, such as `{{model: ..., train: {{...}}}}`, got {data!r}")
    given = [kind for kind in KINDS if kind in data]
    if len(given) > 1:
        raise BraidError(f"{where}: {' and '.join(given)} are two steps: let one read the other")
    train = data.get("train")
    if isinstance(train, dict):
        own = {key: value for key, value in train.items() if key in TRAINING_KEYS}
        options = {key: value for key, value in train.items() if key not in TRAINING_KEYS}
        train = decode(StepTraining, own, f"{where}.train")
        train.options = options
    return decode(KINDS[given[0]] if given else TrainStep, data if train is None else data | {"train": train}, where)


def decode_edit(data: Any, where: str) -> tuple[str, Edit]:
    """An edit's kind and its options as a recipe writes them, `insert` or `insert: {modules: 4}`, decoded strictly."""
    load_edits()
    if isinstance(data, str):
        data = {data: {}}
    if not isinstance(data, dict) or len(data) != 1:
        raise BraidError(f"{where}: expected one edit's name with its options, got {data!r}")
    ((kind, options),) = data.items()
    try:
        chosen = edits[kind]
    except BraidError as error:
        raise BraidError(f"{where}: {error.what}", todo=error.todo) from error
    return kind, decode(chosen, options or {}, f"{where}.{kind}")


def _check_members(key: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise BraidError(f"{key}: each is named once; `seeds` says how often it is trained")
