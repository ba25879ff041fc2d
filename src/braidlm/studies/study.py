"""A study: one recipe for several models on the same data, decoded strictly.

Models trained from scratch on everything, on the same batches, are compared with each other (MoEP's experiment), and
with paths trained apart on a share of their own domain, which are then composed and trained on the rest of all domains
(PaPaformer's).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.models.presets import decode_model
from braidlm.core.recipes import compose_recipe
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig, DataSetConfig, TokenizerConfig
from braidlm.model.config.inheritance import inherit
from braidlm.model.config.ranges import Layers, LayersOrZero, Length, Positive, Range, Seed
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode
from braidlm.model.paths.joins import joins
from braidlm.training.amounts import Amount
from braidlm.training.recipe import CheckpointConfig, LogConfig, SampleConfig, TrainingConfig, ValidationConfig


@dataclass
class StudyData:
    """What all runs of a study share about their data."""

    length: Length = 256
    """Tokens of a training sequence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """One tokenizer for all domains, so that paths can be composed."""
    chunking: Annotated[Choice, PartOf(chunkings, "contiguous")] = "contiguous"  # type: ignore[assignment]
    """How sequences are cut."""
    cache: str = "data"
    """The folder for what is prepared on first use."""


@dataclass
class StudyTraining(TrainingConfig):
    """How every run of a study is trained; their budgets follow from its epochs."""

    budget: Amount = field(init=False, default_factory=lambda: Amount(1))


@dataclass(kw_only=True)
class Phase:
    """What one phase of a study does otherwise than the rest."""

    epochs: Positive | None = None
    """How often it sees its share of the data; by default the study's `epochs`."""
    training: dict[str, Any] = field(default_factory=dict)
    """Options of `training` that differ from the study's."""


@dataclass
class PathsSpec(Phase):
    """The paths: one for each domain, trained apart."""

    model: Any
    """The architecture of a path."""
    share: Annotated[float, Range(above=0, below=1)] = 0.6
    """How much of its domain each path is trained on; composed models are trained on the rest."""


@dataclass
class ComposedSpec(Phase):
    """Options of one composed model."""

    join: Annotated[Choice, PartOf(joins, "shared_linear")] = "shared_linear"  # type: ignore[assignment]
    """How the paths become one stream."""
    layers: Layers | None = None
    """Parallel layers; by default as many as a path has blocks."""
    blocks: LayersOrZero = 1
    """Full-width blocks before and after the parallel layers."""
    start: Literal["mean", "random"] = "mean"
    """How joins and projections are initialised: to pass on the paths' outputs, or at random as in the paper."""
    freeze: list[Literal["paths", "joins", "embedding", "head"]] = field(default_factory=list)
    """Parts that keep their weights when the composed model is trained."""


@dataclass
class Study:
    """Everything about a study."""

    domains: dict[str, DataSetConfig]
    """The data sets, two or more where there are paths; each path is named after its domain."""
    training: dict[str, Any]
    """As in a recipe, without the budget."""
    epochs: Positive = 1.0
    """How often each run sees its share of the data; with `words_per_epoch`, how many such epochs of words."""
    whole: dict[str, Any] = field(default_factory=dict)
    """Architectures trained from scratch on all of every domain, by name."""
    paths: PathsSpec | None = None
    composed: dict[str, ComposedSpec] = field(default_factory=dict)
    """Composed models, by name."""
    name: str = "study"
    """The study's folder is `runs/NAME` unless `out` says otherwise."""
    out: str | None = None
    """The study's folder."""
    seeds: list[Seed] = field(default_factory=lambda: [1])
    """The whole study is run once for each."""
    data: StudyData = field(default_factory=StudyData)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.domains:
            raise BraidError("domains: name at least one data set")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise BraidError(f"seeds: give at least one, each once, got {self.seeds}")
        if self.composed and self.paths is None:
            raise BraidError("composed: there are no paths to compose; give `paths`")
        if self.paths is not None and len(self.domains) < 2:
            raise BraidError("paths: at least two domains are needed, one for each path")
        if not self.whole and self.paths is None:
            raise BraidError("nothing to train: give `whole` models, or `paths`")
        check_folder_name("name", self.name)
        for key, names in (("domains", self.domains), ("whole", self.whole), ("composed", self.composed)):
            for name in names:
                check_folder_name(key, name)
        for twice in sorted(set(self.whole) & set(self.composed)):
            raise BraidError(f"'{twice}' is the name of a whole model and of a composed one")

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")

    def epochs_of(self, phase: Phase | None) -> float:
        """How often a phase, or a whole model (None), sees its share of the data."""
        return self.epochs if phase is None or phase.epochs is None else phase.epochs

    def training_of(self, phase: Phase | None) -> dict[str, Any]:
        """The options of `training` with a phase's own."""
        return self.training if phase is None else inherit(self.training, phase.training)

    @property
    def data_config(self) -> DataConfig:
        """All domains together, which is how the tokenizer is made."""
        return DataConfig(sets=dict(self.domains), **vars(self.data))


def is_study(data: dict[str, Any]) -> bool:
    """Whether a composed recipe is a study (`domains`) and not a single run (`data.sets`)."""
    return "domains" in data


def load_study(name: str, overrides: list[str] | None = None) -> Study:
    """Compose and decode a study; every problem in it is in one error."""
    return decode_study(compose_recipe(name, overrides))


def decode_study(data: dict[str, Any]) -> Study:
    """A study from plain data."""
    problems: list[str] = []
    data = dict(data)
    for key in ("whole", "paths"):
        part = data.get(key)
        if isinstance(part, dict):
            data[key] = _with_models(part, key, problems)
    if isinstance(data.get("training"), dict):
        _check_training(data["training"], "training", problems)
    study = None
    with collecting(problems):
        study = decode(Study, data)
    if study is not None and not problems:
        phases: dict[str, Phase | None] = {"paths": study.paths}
        phases |= {f"composed.{name}": spec for name, spec in study.composed.items()}
        for where, phase in phases.items():
            if phase is not None and phase.training:
                _check_training(study.training_of(phase), f"{where}.training", problems)
    if problems or study is None:
        raise BraidError("\n".join(problems), todo="Nothing was started. `braid show STUDY` checks a study.")
    return study


def _check_training(training: dict[str, Any], where: str, problems: list[str]) -> None:
    if "budget" in training:
        problems.append(f"{where}.budget: a study's budgets come from `epochs` and its data; leave it out")
        return
    with collecting(problems):
        decode(StudyTraining, training, where)


def _with_models(part: dict[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    """Models decoded, so that runs cannot differ in what they inherit."""
    if key == "paths":
        return {**part, "model": _model(part.get("model"), "paths.model", problems)}
    return {name: _model(model, f"whole.{name}", problems) for name, model in part.items()}


def _model(model: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(model, dict):
        problems.append(f"{where}: expected an architecture, got {model!r}")
        return model
    with collecting(problems):
        return decode_model(model, where)
    return model
