"""A recipe: one file that says everything about a run, decoded strictly."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.models.presets import RecipeModel, decode_model, is_preset
from braidlm.core.recipes import compose_recipe
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.halves import Half
from braidlm.model.config.braid_config import Architecture
from braidlm.model.config.ranges import Count, NonNegative, Positive, Range, Rate, Rows, Seed, Size, Temperature
from braidlm.model.config.registry import Choice, import_files
from braidlm.model.config.strict import PartOf, decode, encode
from braidlm.model.paths.switches import Freezable
from braidlm.model.routing.losses import check_losses
from braidlm.training.amounts import Amount, Pace
from braidlm.training.features.feature import asked_features, feature_problems, with_features
from braidlm.training.schedules import schedules
from braidlm.training.step.optimizers.contract import OptimizerConfig, optimizers

import_files("braidlm.training.features")
import_files("braidlm.training.step.optimizers")

Threads = Annotated[int, Range(at_least=1, at_most=1024)]


@dataclass
class LoraTrainingConfig:
    """LoRA: small adapters are trained on the frozen model of `start_from`, by peft (`pip install 'braidlm[eval]'`)."""

    rank: Size = 16
    """The rank of what is added to each matrix, and to each member of a bank: rank x (inputs + outputs) parameters."""
    alpha: Positive | None = None
    """What is added is multiplied by alpha / rank; by default alpha is twice the rank."""
    dropout: Rate = 0.0
    """The dropout rate of the adapters' inputs; 0 where banks (experts, parallel paths of one shape) have adapters."""
    targets: list[str] | str | None = None
    """The matrices by the ends of their names (`[qkv, feed.out]`), or a regular expression of whole names; by default
    all between embedding and head but those of routers. Frozen ones get no adapter."""
    embedding: Literal["frozen", "trained"] = "frozen"
    """Whether the embedding itself is trained beside the adapters, and with it a head that shares its weights, as for a
    language that the model has never read."""


@with_features
@dataclass
class TrainingConfig:
    """How the model is trained."""

    if TYPE_CHECKING:  # the keys of features

        def __getattr__(self, key: str) -> Any: ...

    budget: Amount
    """How much: `2000 steps`, `50M tokens` or `10M words`; met exactly. With a larger one a finished run goes on."""
    batch: Rows = 32
    """Sequences per process in one forward pass."""
    accumulation: Rows = 1
    """Forward passes per optimizer step."""
    optimizer: Annotated[Choice, PartOf(optimizers, "adamw")] = field(
        default_factory=lambda: Choice("adamw", OptimizerConfig())
    )
    """AdamW, or `{kind: muon}`: Muon for the matrices of blocks and AdamW for all else."""
    schedule: Annotated[Choice, PartOf(schedules, "cosine")] = "cosine"  # type: ignore[assignment]
    """The learning rate over the training."""
    warmup: Amount = field(default_factory=lambda: Amount(0))
    """How long the rate rises from zero."""
    clip: Positive | None = 1.0
    """The maximum norm of the gradient; null for no clipping."""
    precision: Literal["auto", "bf16", "float32", "pure_bf16"] = "auto"
    """auto: bf16 autocast on a GPU; on a CPU float32, or bf16 where the CPU has instructions for it (AMX) and a pass
    that is measured before the first step is clearly faster in it. Weights are trained in float32, but for pure_bf16
    (of a decoder only), in which they, their gradients and AdamW's moments are bf16 too: 8 bytes for each parameter in
    place of 16, and what changes a weight by less than about 1/500 of it is lost."""
    compile: bool | None = None
    """torch.compile; by default on a GPU, unless the step is a graph and every part has kernels of its own."""
    threads: Threads | None = None
    """CPU threads of a step, on a CPU; by default OMP_NUM_THREADS or else the fastest number, measured before the first
    step and kept in checkpoints. Another number rounds differently, and is otherwise the same run."""
    graph: bool | None = None
    """Replay the whole step as one CUDA graph; by default on a single GPU."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third slower."""
    routing_losses: dict[str, NonNegative] | None = None
    """Losses of all routers with their weights, in place of the model's own, which the trained model then has as its
    own: {load_concentration: 0.001}."""
    freeze: list[Freezable] = field(default_factory=list)
    """Parts that keep their weights, beside the folder's own. `joins` includes projections and the last norm; `blocks`
    is all between embedding and head, and `routers` those of experts, both but for `modules`, which were inserted."""
    train: Literal["all", "gates"] = "all"
    """What is trained: all that is not frozen, or the model's gates alone."""
    lora: LoraTrainingConfig | None = None
    """Train adapters in place of the model's own weights; checkpoints have them merged, and beside them alone. Those of
    a decoder have the adapters alone, and name their base."""

    def __post_init__(self) -> None:
        check_losses(self.routing_losses or ())
        if self.budget.count < 1:
            raise BraidError("budget must be at least 1")


@dataclass
class CheckpointConfig:
    """When the run is saved."""

    every: Pace = field(default_factory=lambda: Pace.from_shorthand("500 steps"))
    """`500 steps`, or `1M words to 10M, then 10M`; each mark is met exactly. The end is always saved."""
    keep: Count | None = 3
    """How many model folders to keep: the newest, at least two in case one is damaged, and beside them the best, if it
    is older and was validated when it was saved; null keeps all."""


@dataclass
class ValidationConfig:
    """When held-out text is scored."""

    every: Pace = field(default_factory=lambda: Pace.from_shorthand("500 steps"))
    tokens: Count | None = 100_000
    """At most this many tokens of each data set (whole documents); null for all."""
    half: Half | None = None
    """Only one half of the held-out text: `choose` to compare recipes by, or `report` for what was chosen. Documents in
    their order make blocks of 16 KiB, which are in the halves in turn."""


@dataclass
class SampleConfig:
    """Texts that the model generates during the training."""

    every: Pace | None = None
    """By default with each validation."""
    prompts: list[str] = field(default_factory=list)
    """The beginnings of the texts; by default there are none."""
    tokens: Count = 80
    """The maximum number of tokens of a text."""
    temperature: Temperature = 0.8
    """0 takes the most probable token."""


@dataclass
class LogConfig:
    """What is recorded. metrics.jsonl is always written."""

    every: Count = 10
    """Steps between records."""
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Also send the metrics there."""
    project: str = "braid"
    """The Weights & Biases project."""


@dataclass
class Recipe:
    """Everything about a run."""

    data: DataConfig
    training: TrainingConfig
    name: str = "run"
    """The run's name; its folder is `runs/NAME` unless `out` says otherwise."""
    out: str | None = None
    """The run's folder."""
    seed: Seed = 1
    """Fixes weights, order of data and dropout."""
    model: Any = None
    """The architecture; see `braid list parts`."""
    start_from: str | None = None
    """A model whose weights the training begins with; it brings its architecture, unless `model` is given, and its
    tokenizer for sources that are prepared."""
    decoder: str | None = None
    """A decoder of transformers to train as it is, in place of a Braid model: its folder, its name on the Hub, or a
    folder of gates or of LoRA adapters. It brings its tokenizer for sources that are prepared."""
    licence: str | None = None
    """The model's licence for its card, as the Hub writes it: apache-2.0, mit, cc-by-4.0."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_folder_name("name", self.name)
        if errors := [*self._problems(), *feature_problems(self.training, self.data)]:
            raise errors[0] if len(errors) == 1 else BraidError("\n".join(line for e in errors for line in e.lines()))

    def _problems(self) -> Iterator[BraidError]:
        """Keys that do not go together; features say it of theirs themselves."""
        training = self.training
        if training.lora is not None and self.start_from is None and self.decoder is None:
            todo = "Name one: start_from=MODEL, or leave out training.lora to train a new one."
            yield BraidError("training.lora adapts a trained model", todo=todo)
        if training.lora is not None and training.optimizer.kind == "muon":
            what = "training.lora: Muon trains whole matrices, and adapters are two thin ones whose product counts"
            todo = "Leave out training.optimizer.kind, so that AdamW trains the adapters."
            yield BraidError(what, todo=todo)
        if training.lora is not None and training.lora.embedding == "trained" and self.decoder is not None:
            what = "training.lora.embedding: only Braid's models train their embedding beside adapters"
            todo = "Leave it out, or train the whole decoder without training.lora."
            yield BraidError(what, todo=todo)
        if self.decoder is None:
            if training.precision == "pure_bf16":
                what = "training.precision: pure_bf16 is for decoders; Braid's models train in float32 or bf16"
                yield BraidError(what)
            return
        if self.start_from is not None:
            yield BraidError("start_from is a Braid model, and decoder is one of transformers: give one of them")
        if training.lora is not None and training.train == "gates":
            yield BraidError("training.lora trains adapters and gates, and training.train: gates only these: give one")
        given = {
            "data.chunking": chunkings[self.data.chunking.kind].keeps_rows,
            "training.routing_losses": training.routing_losses is not None,
            "training.freeze": training.freeze,
            "training.graph": training.graph,
            "training.parallel.experts": training.parallel.experts > 1,
        }
        asked = asked_features(training, self.data).values()
        given |= {one.name: not one.for_decoders and one.is_given(training) for one in asked if one.name}
        if named := [name for name, is_given in given.items() if is_given]:
            yield BraidError(
                f"{', '.join(named)}: only Braid's models have this, and a decoder of transformers is trained as it is",
                todo="Leave it out; `training.train: gates` and `training.lora` say what of a decoder is trained.",
            )

    @property
    def folder(self) -> str:
        return self.out or f"runs/{self.name}"


@dataclass
class LoadedRecipe:
    """A recipe with its model decoded."""

    recipe: Recipe
    model: RecipeModel | None  # None where the model is the one to start from, or a decoder

    @property
    def architecture(self) -> Architecture | None:
        return None if self.model is None else self.model.architecture

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None else self.model.vocab_size

    def as_dict(self) -> dict[str, Any]:
        """The resolved recipe, as written into the run folder."""
        return encode(self.recipe) | ({} if self.model is None else {"model": encode(self.model)})


def load_recipe(name: str, overrides: list[str] | None = None) -> LoadedRecipe:
    """Compose and decode a recipe; every problem in it is in one error."""
    return decode_recipe(compose_recipe(name, overrides), name)


def decode_recipe(data: dict[str, Any], name: str = "NAME") -> LoadedRecipe:
    """A recipe from plain data, which was composed from the recipe of this name."""
    if is_preset(data):
        advice = f"Use it in a recipe of a run: `defaults: [/models/{Path(name).stem}@model, _self_]`."
        raise BraidError("this is a model without data and training", name, advice)
    problems: list[str] = []
    decoded, model = None, data.get("model")
    if isinstance(model, (dict, RecipeModel)):
        with collecting(problems):
            decoded = decode_model(model)
        if problems and data.get("start_from"):
            problems.append("model: the one to start_from has its own; leave `model` out, or give the whole of it")
    elif model is not None:
        problems.append(f"model: expected a mapping, got '{model}'")
    elif not data.get("start_from") and not data.get("decoder"):
        problems.append("model: missing; give an architecture, or start_from a model folder, or a decoder")
    if model is not None and data.get("decoder"):
        problems.append("decoder: brings its own architecture; leave out model")
    recipe = None
    with collecting(problems):
        recipe = decode(Recipe, {key: value for key, value in data.items() if key != "model"})
    if problems or recipe is None:
        raise BraidError("\n".join(problems), todo="Nothing was started. `braid show RECIPE` checks a recipe.")
    return LoadedRecipe(recipe, decoded)
