"""A study: several models on the same data, and what must hold between them.

Models trained from scratch on everything, on the same batches, are compared with each other (MoEP's experiment), with
paths trained apart on a share of their own domain, which are then composed and trained on the rest of all domains
(PaPaformer's), and with variants: what edits and further training make of a trained model (ModuleFormer's).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from braidlm.core.errors import BraidError, check_folder_name, did_you_mean
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig, DataSetConfig, TokenizerConfig
from braidlm.data.loading.order import orders
from braidlm.model.config.ranges import Length, Positive, Seed
from braidlm.model.config.registry import Choice, inherit
from braidlm.model.config.strict import PartOf
from braidlm.studies.phases import AverageSpec, ComposedSpec, DistilledSpec, PathsSpec, Phase, VariantSpec, WholeSpec
from braidlm.studies.tasks import TasksConfig
from braidlm.training.amounts import Amount
from braidlm.training.config import CheckpointConfig, LogConfig, SampleConfig, TrainingConfig, ValidationConfig


@dataclass
class StudyData:
    """What all runs of a study share about their data."""

    length: Length = 256
    """Tokens of a training sequence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """One tokenizer for all domains, so that paths can be composed."""
    chunking: Annotated[Choice, PartOf(chunkings, "contiguous")] = "contiguous"  # type: ignore[assignment]
    """How sequences are cut."""
    order: Annotated[Choice, PartOf(orders, "shuffled")] = "shuffled"  # type: ignore[assignment]
    """In which order documents are read, in each domain."""
    cache: str = "data"
    """The folder for what is prepared on first use."""


@dataclass
class StudyTraining(TrainingConfig):
    """How every run of a study is trained; their budgets follow from its epochs."""

    budget: Amount = field(init=False, default_factory=lambda: Amount(1))


@dataclass
class Study:
    """Everything about a study."""

    domains: dict[str, DataSetConfig]
    """The data sets, two or more where there are paths; each path is named after its domain."""
    training: dict[str, Any]
    """As in a recipe, without the budget."""
    epochs: Positive = 1.0
    """How often each run sees its share of the data; with `words_per_epoch`, how many such epochs of words."""
    whole: dict[str, WholeSpec] = field(default_factory=dict)
    """Models trained from scratch, by name: an architecture, or one as `model` with options of its own."""
    paths: PathsSpec | None = None
    composed: dict[str, ComposedSpec] = field(default_factory=dict)
    """Composed models, by name."""
    variants: dict[str, VariantSpec] = field(default_factory=dict)
    """What edits and further training make of trained models, by name."""
    averages: dict[str, AverageSpec] = field(default_factory=dict)
    """Averages of models that were trained apart, by name."""
    distilled: dict[str, DistilledSpec] = field(default_factory=dict)
    """Models that learn from averages, by name: students of an average, which may have several."""
    name: str = "study"
    """The study's folder is `runs/NAME` unless `out` says otherwise."""
    out: str | None = None
    """The study's folder."""
    seeds: list[Seed] = field(default_factory=lambda: [1])
    """The whole study is run once for each."""
    licence: str | None = None
    """The licence of its models for their cards, as the Hub writes it: apache-2.0, mit, cc-by-4.0."""
    data: StudyData = field(default_factory=StudyData)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    tasks: TasksConfig | None = None
    """What every model is evaluated on, beside the held-out text of each domain."""
    samples: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.domains:
            raise BraidError("domains: name at least one data set")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise BraidError(f"seeds: give at least one, each once, got {self.seeds}")
        for name, composed in self.composed.items():
            if composed.members is None and self.paths is None:
                raise BraidError(f"composed.{name}: there are no paths to compose; give `paths`, or its `members`")
        readers: dict[str, WholeSpec | DistilledSpec] = {f"whole.{name}": spec for name, spec in self.whole.items()}
        readers |= {f"distilled.{name}": spec for name, spec in self.distilled.items()}
        for where, spec in readers.items():
            if spec.text == "shared" and self.paths is None:
                raise BraidError(f"{where}.text: there are no paths that leave text to others; give `paths`")
        if self.paths is not None and len(self.domains) < 2:
            raise BraidError("paths: at least two domains are needed, one for each path")
        if not self.whole and self.paths is None and not self.variants:
            raise BraidError("nothing to train: give `whole` models, `paths` or `variants`")
        check_folder_name("name", self.name)
        for name in self.domains:
            check_folder_name("domains", name)
        self._check_names()
        self._check_domains()
        self._check_starts()
        self._check_seeds()
        self._check_members()
        self._check_averages()
        self._check_distilled()

    def _check_names(self) -> None:
        """Each model has a folder of its own."""
        kinds: dict[str, Iterable[str]] = {
            "a path": self.domains if self.paths is not None else (),
            "a whole model": self.whole,
        }
        kinds |= {"a composed one": self.composed, "a variant": self.variants, "an average": self.averages}
        kinds |= {"a distilled one": self.distilled}
        taken: dict[str, str] = {}
        for kind, names in kinds.items():
            for name in names:
                check_folder_name("the name of a model", name)
                if name in taken:
                    raise BraidError(f"'{name}' is the name of {taken[name]} and of {kind}")
                taken[name] = kind

    def _check_domains(self) -> None:
        """Whole models and variants are trained on domains that exist."""
        trained = {f"whole.{name}": spec.domains for name, spec in self.whole.items()}
        trained |= {f"variants.{name}": spec.domains for name, spec in self.variants.items()}
        unknown = [
            f"{where}.domains: there is no domain '{domain}'.{did_you_mean(domain, self.domains)}"
            for where, domains in trained.items()
            for domain in domains or ()
            if domain not in self.domains
        ]
        empty = [f"{w}.domains: name at least one" for w, d in trained.items() if w.startswith("whole") and d == []]
        if unknown or empty:
            raise BraidError("\n".join(unknown + empty))

    def _check_starts(self) -> None:
        """A variant is made of a model that is there by then."""
        names = list(self.variants)
        later = [name for name, spec in self.composed.items() if spec.members is not None]
        for at, (name, spec) in enumerate(self.variants.items()):
            if spec.start in names[at:]:
                raise BraidError(
                    f"variants.{name}.start: '{spec.start}' is not made yet",
                    todo="A variant stands before those that are made of it.",
                )
            if spec.start in later:
                raise BraidError(f"variants.{name}.start: '{spec.start}' has members, and is made after all variants")

    def _check_seeds(self) -> None:
        """A model that is trained with some seeds alone has some of the study's."""
        for where, spec in (("paths", self.paths), *((f"whole.{name}", spec) for name, spec in self.whole.items())):
            own = None if spec is None else spec.seeds
            if own is not None and (not own or set(own) - set(self.seeds)):
                raise BraidError(f"{where}.seeds: expected some of the study's, {self.seeds}, got {own}")

    def _check_members(self) -> None:
        """Averages and composed models have members whose architecture is known, each once."""
        trained = [*(self.domains if self.paths is not None else ()), *self.whole]
        for name, variant in self.variants.items():  # each stands after what it is made of
            trained += [name] if not variant.edits and variant.start in trained else []
        made = {f"averages.{name}.members": spec.members for name, spec in self.averages.items()}
        made |= {f"composed.{name}.members": spec.members or [] for name, spec in self.composed.items()}
        for where, members in made.items():
            for member in members:
                if member not in trained:
                    raise BraidError(
                        f"{where}: there is no path, whole model or variant without edits '{member}'."
                        f"{did_you_mean(member, trained)}"
                    )
            if len(set(members)) < len(members):
                raise BraidError(f"{where}: each is named once; `seeds` says how often it is trained")
        for name, composed in self.composed.items():
            if composed.members is not None and len(composed.members) < 2:
                raise BraidError(f"composed.{name}.members: name at least two")
            if not self.seeds_of(name):
                raise BraidError(f"composed.{name}.members: no seed is that of every member")

    def _check_averages(self) -> None:
        """An average is one of at least two members."""
        for name, spec in self.averages.items():
            seeds = [self.seeds_of(member) for member in spec.members]
            if spec.seeds == "each" and any(own != seeds[0] for own in seeds):
                raise BraidError(f"averages.{name}: an average for each seed needs members of the same seeds")
            if (sum(map(len, seeds)) if spec.seeds == "all" else len(seeds)) < 2:
                raise BraidError(
                    f"averages.{name}: an average has at least two members",
                    todo="Give the study several seeds, or name several members.",
                )

    def _check_distilled(self) -> None:
        """A distilled model learns from an average that there is, with the seeds of one that is made for each seed."""
        for name, spec in self.distilled.items():
            if spec.teacher not in self.averages:
                raise BraidError(
                    f"distilled.{name}.teacher: there is no average '{spec.teacher}'."
                    f"{did_you_mean(spec.teacher, self.averages)}"
                )
            own = self.seeds_of_average(spec.teacher)
            if spec.seeds is not None and (not spec.seeds or set(spec.seeds) - set(own or spec.seeds)):
                expected = "at least one" if own is None else f"some of the average's, {own}"
                raise BraidError(f"distilled.{name}.seeds: expected {expected}, got {spec.seeds}")

    @property
    def model_names(self) -> list[str]:
        """The models that a variant may be made of."""
        paths = list(self.domains) if self.paths is not None else []
        composed = [name for name, spec in self.composed.items() if spec.members is None]
        return [*paths, *composed, *self.whole, *self.variants]

    def parts_of(self, composed: str) -> list[str]:
        """What a composed model is made of, in the order in which these are made."""
        members = self.composed[composed].members
        return list(self.domains) if members is None else [name for name in self.model_names if name in members]

    def base_of(self, variant: str) -> str:
        """Where a variant comes from in the end: a model of the study that is none, or a folder."""
        start = self.variants[variant].start
        return self.base_of(start) if start in self.variants else start

    def line_of(self, model: str) -> list[str]:
        """A model after those of the study that it was trained on from."""
        start = self.variants[model].start if model in self.variants else None
        return [*(self.line_of(start) if start in self.model_names else []), model]

    def seeds_of(self, model: str) -> list[int]:
        """The seeds that a path, a composed or a whole model is trained with, or a variant of one."""
        if model in self.variants:
            base = self.base_of(model)
            return self.seeds_of(base) if base in self.model_names else self.seeds
        if model in self.composed:
            parts = [self.seeds_of(part) for part in self.parts_of(model)]
            return [seed for seed in self.seeds if all(seed in seeds for seeds in parts)]
        spec = self.whole.get(model, self.paths)
        own = None if spec is None else spec.seeds
        return [seed for seed in self.seeds if own is None or seed in own]

    def seeds_of_average(self, name: str) -> list[int] | None:
        """The seeds that an average is made for, each of its own; None of one that is made of all seeds."""
        spec = self.averages[name]
        return self.seeds_of(spec.members[0]) if spec.seeds == "each" else None

    def seeds_of_distilled(self, name: str) -> list[int]:
        """The seeds that a distilled model is trained with."""
        spec = self.distilled[name]
        return spec.seeds or self.seeds_of_average(spec.teacher) or self.seeds

    def domains_of(self, spec: WholeSpec | VariantSpec) -> list[str]:
        """The domains that a model is trained on."""
        return list(self.domains) if spec.domains is None else list(spec.domains)

    def begin_of(self, spec: WholeSpec | DistilledSpec) -> float:
        """Where the text that a model reads begins in each of its domains."""
        return 0.0 if spec.text == "all" else self.shared_from

    @property
    def shared_from(self) -> float:
        """Where the text begins that paths leave to composed models; without paths that is all of it."""
        return 0.0 if self.paths is None else self.paths.share

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")

    def epochs_of(self, phase: Phase) -> float:
        """How often a phase sees its share of the data, unless it has a budget."""
        return self.epochs if phase.epochs is None else phase.epochs

    def training_of(self, phase: Phase) -> dict[str, Any]:
        """The options of `training` with a phase's own."""
        merged: dict[str, Any] = inherit(self.training, phase.training)
        return merged

    @property
    def data_config(self) -> DataConfig:
        """All domains together, which is how the tokenizer is made."""
        return DataConfig(sets=dict(self.domains), **vars(self.data))
