"""A study: a graph of named steps on the same data. Every step makes a model, and says which models it reads.

Models trained from scratch on everything, on the same batches, are compared with each other (MoEP's experiment), with
paths trained apart on the text that their owners keep, which are then composed and trained on the rest of all domains
(PaPaformer's), and with what edits and further training make of a trained model (ModuleFormer's).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from braidlm.core.errors import BraidError, check_folder_name, did_you_mean
from braidlm.core.models.presets import RecipeModel
from braidlm.data.loading.config import DataConfig, DataSetConfig, SharedData
from braidlm.edits.composing.path_models import MODULES
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.task_data import VARIABLE, find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import expand
from braidlm.model.config.ranges import Positive, Range, Seed
from braidlm.model.config.registry import inherit
from braidlm.studies.steps import (
    TRAINING_KEYS,
    AverageStep,
    ComposeStep,
    DistilStep,
    EditStep,
    Step,
    StepTraining,
    Text,
    TrainStep,
)
from braidlm.training.amounts import Amount
from braidlm.training.recipe import CheckpointConfig, LogConfig, SampleConfig, TrainingConfig, ValidationConfig

Role = Literal["path", "composed", "whole", "variant", "given", "average", "distilled"]
"""What a model is in the tables: a `path` is trained from scratch on text that its owner keeps, a `whole` model on
text that all may read, a `variant` is made of another model, and a `given` one is a folder that a step names."""


@dataclass
class StudyTraining(TrainingConfig):
    """How every run of a study is trained; their budgets follow from its epochs."""

    budget: Amount = field(init=False, default_factory=lambda: Amount(1))


@dataclass
class StepOptions(StudyTraining):
    """The options of one step's training, with the keys that a step has beside them."""

    other_keys: ClassVar[tuple[str, ...]] = TRAINING_KEYS


@dataclass
class TasksConfig:
    """What every model of a study is evaluated on, as `braid eval` does it."""

    names: list[str]
    """Tasks and suites of `braid list tasks`."""
    data: str | None = None
    """The folder in which tasks look for their data; by default that of `braid eval`."""
    settings: Settings = field(default_factory=Settings)
    """Settings of tasks that have some."""

    def __post_init__(self) -> None:
        if not self.names:
            raise BraidError("names: there is no task")
        for name in expand(self.names):
            TASKS[name]  # raises an error that suggests the nearest name

    def check(self) -> None:
        """Raise an error for data that is missing, before any model is trained."""
        where = f"Say where data is with `tasks.data=FOLDER` (or {VARIABLE}=FOLDER)"
        find_data(expand(self.names), self.data, {}, f"{where}, or leave the tasks out with `tasks=null`.")


@dataclass
class Study:
    """Everything about a study."""

    domains: dict[str, DataSetConfig]
    """The data sets."""
    training: dict[str, Any]
    """The training section of a recipe, without the budget."""
    steps: dict[str, Step]
    """The steps, by the names of the models that they make."""
    models: dict[str, Any] = field(default_factory=dict)
    """Architectures that steps name."""
    kept: Annotated[float, Range(above=0, below=1)] | None = None
    """How much of each domain its owner keeps: `text: kept` reads that, and `text: shared` the rest."""
    epochs: Positive = 1.0
    """How often each training reads its text; with `words_per_epoch`, how many such epochs of words."""
    name: str = "study"
    """The study's folder is `runs/NAME` unless `out` says otherwise."""
    out: str | None = None
    """The study's folder."""
    seeds: list[Seed] = field(default_factory=lambda: [1])
    """The whole study is run once for each."""
    licence: str | None = None
    """The licence of its models for their cards, as the Hub writes it: apache-2.0, mit, cc-by-4.0."""
    data: SharedData = field(default_factory=SharedData)
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
        if not self.steps:
            raise BraidError("steps: nothing to do: name at least one step")
        check_folder_name("name", self.name)
        for name, domain in self.domains.items():
            check_folder_name("domains", name)
            if not domain.holdout and not domain.has_validation:
                why = "a study compares its models on held-out text of every domain, and this has none"
                raise BraidError(f"domains.{name}.holdout: {why}")
        self._raise(self._check)
        self.order = list(self._sorted())
        self._raise(self._check_sources)

    def _raise(self, check: Callable[[str], Iterator[str]]) -> None:
        """Tell the problems of all steps in one error; each begins with the part of the key after the step's name."""
        if problems := [f"steps.{name}{problem}" for name in self.steps for problem in check(name)]:
            raise BraidError("\n".join(problems))

    def _check(self, name: str) -> Iterator[str]:
        """What is wrong with the names that a step has."""
        step = self.steps[name]
        check_folder_name("the name of a step", name)
        if step.train is not None:
            yield from self._check_text(step.train)
        for other in step.reads:
            key = ".distil.teacher" if isinstance(step, DistilStep) else f".{step.kind}"
            if other == name:
                yield ": it reads itself"
            elif other not in self.steps and not hasattr(step, "of"):  # `of` may name a folder
                yield f"{key}: there is no step '{other}'.{did_you_mean(other, self.steps)}"

    def _check_text(self, train: StepTraining) -> Iterator[str]:
        """What is wrong with the domains that a training reads, and with the part of their text that it asks for."""
        for domain in train.domains or ():
            if domain not in self.domains:
                yield f".train.domains: there is no domain '{domain}'.{did_you_mean(domain, self.domains)}"
        read = train.domains or self.domains
        for domain in train.text if isinstance(train.text, dict) else ():
            if domain not in read:
                yield f".train.text: the step does not read '{domain}'.{did_you_mean(domain, read)}"
        asked = train.text.values() if isinstance(train.text, dict) else [train.text]
        if self.kept is None and (partly := [text for text in asked if text != "all"]):
            yield f".train.text: how much text is {partly[0]} is not said; give the study `kept: 0.6`"

    def _check_sources(self, name: str) -> Iterator[str]:
        """What is wrong with the models that a step reads, and with its seeds, where no steps read each other."""
        step = self.steps[name]
        if isinstance(step, DistilStep) and self.model_of(name) is None:
            yield f".model: missing; '{step.distil.teacher}' was not trained with an architecture of its own"
        composed = isinstance(step, (ComposeStep, AverageStep)) and step.join.kind != MODULES
        for other in filter(self._is_edited, step.reads if composed else ()):
            yield f".{step.kind}: '{other}' is edited, and what it becomes is not known before it is made"
        yield from self._check_seeds(name)

    def _is_edited(self, name: str) -> bool:
        """Whether a model is edited, or made of one that is."""
        step = self.steps.get(name)
        return isinstance(step, EditStep) or (isinstance(step, TrainStep) and self._is_edited(step.of or ""))

    def _sorted(self) -> Iterator[str]:
        """The steps in the order of the recipe, but each after those that it reads."""
        done: list[str] = []

        def visit(name: str, above: tuple[str, ...]) -> Iterator[str]:
            if name in above:
                raise BraidError(f"steps.{name}: steps read each other in a circle: {' -> '.join((*above, name))}")
            if name not in done:
                for other in self.inputs(name):
                    yield from visit(other, (*above, name))
                done.append(name)
                yield name

        for name in self.steps:
            yield from visit(name, ())

    def _check_seeds(self, name: str) -> Iterator[str]:
        """What is wrong with the seeds of a step."""
        step, own = self.steps[name], self.steps[name].seeds
        if isinstance(step, AverageStep):
            seeds = [self.seeds_of(member) for member in step.average]
            if step.seeds == "each" and any(one != seeds[0] for one in seeds):
                yield ": an average for each seed needs members of the same seeds"
            elif len(self.members(name)) < 2:
                yield ": an average has at least two members. Give the study several seeds, or name several members."
            return
        possible = self._possible_seeds(name)
        if own is not None and (not own or (possible is not None and set(own) - set(possible))):
            yield f".seeds: expected {'at least one' if possible is None else f'some of {possible}'}, got {own}"
        elif not self.seeds_of(name):
            yield f".{step.kind}: no seed is that of every model that it reads"

    def _possible_seeds(self, name: str) -> list[int] | None:
        """The seeds that a step could be done with; None if any."""
        step = self.steps[name]
        read = [self.seeds_of(other) for other in self.inputs(name) if not self.is_once(other)]
        if isinstance(step, DistilStep):
            return read[0] if read else None
        return [seed for seed in self.seeds if all(seed in seeds for seeds in read)]

    def inputs(self, name: str) -> list[str]:
        """The steps that a step reads."""
        return [other for other in self.steps[name].reads if other in self.steps]

    def before(self, name: str) -> list[str]:
        """The steps that must be done before a step; the steps before a teacher are not counted."""
        if isinstance(self.steps[name], DistilStep):
            return []
        return list(dict.fromkeys(one for other in self.inputs(name) for one in (*self.before(other), other)))

    def is_once(self, name: str) -> bool:
        """Whether a step makes one model of all seeds."""
        step = self.steps[name]
        return isinstance(step, AverageStep) and step.seeds == "all"

    def is_late(self, name: str) -> bool:
        """Whether a step needs every seed of others."""
        return self.is_once(name) or any(map(self.is_late, self.inputs(name)))

    def seeds_of(self, name: str) -> list[int]:
        """The seeds that a step is done with; one average of all seeds has the seeds of its members."""
        step = self.steps[name]
        if isinstance(step, AverageStep):
            found = {seed for member in step.average for seed in self.seeds_of(member)}
            return [seed for seed in self.seeds if seed in found]
        possible = self._possible_seeds(name)
        if possible is None:
            return step.seeds or self.seeds
        return [seed for seed in possible if step.seeds is None or seed in step.seeds]

    def members(self, name: str) -> list[tuple[str, int]]:
        """The models of an average or a composed model as (step, seed), by seed, then by step; of one that is made for
        each seed the first's."""
        seeds = self.seeds_of(name) if self.is_once(name) else self.seeds_of(name)[:1]
        return [(one, seed) for seed in seeds for one in self.steps[name].reads if seed in self.seeds_of(one)]

    def path_names(self, name: str) -> list[str]:
        """The names that the models of an average or a composed model have in it."""
        members = self.members(name)
        if len({seed for _, seed in members}) == 1:
            return [step for step, _ in members]
        return [f"{'seed' if len(self.steps[name].reads) == 1 else step}_{seed}" for step, seed in members]

    def path_of_domains(self, name: str) -> dict[str, str] | None:
        """The path of an average or a composed model that was trained on each domain alone, where its name is another.
        None where a domain has no such path, or several."""
        step = self.steps[name]
        has_paths = isinstance(step, (AverageStep, ComposeStep)) and step.join.kind != MODULES
        names, found = self.path_names(name) if has_paths else [], {}
        for domain in (one for one in self.domains if names and one not in names):
            own = [one for one in names if one in self.steps and self.domains_of(one) == [domain]]
            if len(own) != 1:
                return None
            found[domain] = own[0]
        return found

    def role(self, name: str) -> Role:
        """What the model of a step is in the tables."""
        step = self.steps[name]
        if isinstance(step, TrainStep) and step.of is None:
            return "path" if self.training_of(name).text == "kept" else "whole"
        roles: dict[str, Role] = {"compose": "composed", "average": "average", "distil": "distilled"}
        return roles.get(step.kind, "variant")

    def base_of(self, name: str) -> str:
        """Where a variant comes from in the end: a model of the study that is none, or a folder."""
        of = getattr(self.steps[name], "of", None) if name in self.steps else None
        return name if of is None else self.base_of(of)

    def model_of(self, name: str) -> RecipeModel | None:
        """The architecture that a step is trained with: its own, or that of what it trains on, or its teacher's, and of
        an average that of its first member; None where it follows from composing, edits or a folder."""
        step = self.steps.get(name)
        if isinstance(step, (TrainStep, DistilStep)):
            return self.model_of(step.reads[0]) if step.model is None else step.model
        return self.model_of(step.average[0]) if isinstance(step, AverageStep) else None

    def training_of(self, name: str) -> StepTraining:
        """The training of a step that has one."""
        train = self.steps[name].train
        assert train is not None
        return train

    def domains_of(self, name: str) -> list[str]:
        """The domains that a step is trained on."""
        step = self.steps[name]
        if step.train is None:
            return []
        if step.train.domains is None and isinstance(step, DistilStep):
            return self.known_domains(step.distil.teacher)
        return list(self.domains if step.train.domains is None else step.train.domains)

    def known_domains(self, name: str) -> list[str]:
        """The domains that a model has read, also in what it is made of."""
        read = {*self.domains_of(name), *(one for other in self.inputs(name) for one in self.known_domains(other))}
        return [domain for domain in self.domains if domain in read]

    def text_of(self, name: str, domain: str) -> Text:
        """What a step reads of one of its domains."""
        text = self.training_of(name).text
        return text.get(domain, "all") if isinstance(text, dict) else text

    def part_of_text(self, name: str, domain: str) -> tuple[float, float]:
        """Where the text that a step reads of a domain begins and ends."""
        kept = 0.0 if self.kept is None else self.kept
        return {"all": (0.0, 1.0), "kept": (0.0, kept), "shared": (kept, 1.0)}[self.text_of(name, domain)]

    def epochs_of(self, name: str) -> float:
        """How often a step reads its text, unless it has a budget."""
        own = self.training_of(name).epochs
        return self.epochs if own is None else own

    def options_of(self, name: str) -> dict[str, Any]:
        """The options of `training` with a step's own."""
        return inherit(self.training, self.training_of(name).options)

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")

    @property
    def data_config(self) -> DataConfig:
        """All domains together, which is how the tokenizer is made."""
        return DataConfig(sets=dict(self.domains), **vars(self.data))
