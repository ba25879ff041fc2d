"""A recipe: one file that says everything about a run, decoded strictly."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from braidlm.core.errors import BraidError, check_folder_name, collecting
from braidlm.core.models.presets import RecipeModel, decode_model, is_preset
from braidlm.core.recipes import compose_recipe
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.halves import Half
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.ranges import (
    Count,
    NonNegative,
    Positive,
    Range,
    Rate,
    Rows,
    Seed,
    Share,
    Size,
    Temperature,
)
from braidlm.model.config.registry import Choice, import_files
from braidlm.model.config.strict import PartOf, decode, encode
from braidlm.model.freezing import Freezable
from braidlm.model.routing.losses import check_losses
from braidlm.training.amounts import Amount, Pace
from braidlm.training.averaging import averages
from braidlm.training.distill.config import DistillConfig
from braidlm.training.lengths import ShorterRows, check_lengths
from braidlm.training.schedules import dropout_schedules, schedules
from braidlm.training.step.extra_losses import extra_losses
from braidlm.training.step.optimizers.contract import OptimizerConfig, optimizers

import_files("braidlm.training.losses")
import_files("braidlm.training.step.optimizers")

Threads = Annotated[int, Range(at_least=1, at_most=1024)]


@dataclass
class LoraTrainingConfig:
    """LoRA: small adapters are trained on the frozen model of `start_from`, by peft (`pip install 'braidlm[eval]'`)."""

    rank: Size = 16
    """Of what is added to each matrix, and to each member of a bank: rank x (inputs + outputs) parameters."""
    alpha: Positive | None = None
    """What is added is multiplied by alpha / rank; by default alpha is twice the rank."""
    dropout: Rate = 0.0
    """Of the adapters' inputs; 0 where banks (experts, parallel paths of one shape) have adapters."""
    targets: list[str] | str | None = None
    """The matrices by the ends of their names (`[qkv, feed.out]`), or a regular expression of whole names; by default
    all between embedding and head but those of routers. Frozen ones get no adapter."""

    @property
    def scale(self) -> float:
        """The factor of what is added."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass
class TrainingConfig:
    """How the model is trained."""

    budget: Amount
    """How much: `2000 steps`, `50M tokens` or `10M words`; met exactly. With a larger one a finished run goes on."""
    batch: Rows = 32
    """Sequences per process in one forward pass."""
    accumulation: Rows = 1
    """Forward passes per optimizer step."""
    lengths: list[ShorterRows] = field(default_factory=list)
    """Shorter sequences at first: `[{until: 0.5, length: 128}]` cuts every sequence of the data into rows of 128 tokens
    until half of the training is done. A step has the same tokens, so that batch and rate need not change."""
    optimizer: Annotated[Choice, PartOf(optimizers, "adamw")] = field(
        default_factory=lambda: Choice("adamw", OptimizerConfig())
    )
    """AdamW, or `{kind: muon}`: Muon for the matrices of blocks and AdamW for all else."""
    schedule: Annotated[Choice, PartOf(schedules, "cosine")] = "cosine"  # type: ignore[assignment]
    """The learning rate over the training."""
    warmup: Amount = field(default_factory=lambda: Amount(0))
    """How long the rate rises from zero."""
    average: Annotated[Choice, PartOf(averages)] | None = None
    """Validate and save an average of the weights over steps, `{kind: ema, rate: 0.999}` or `{kind: last, share: 0.2}`,
    in place of those of the last step; the training goes on with its own."""
    clip: Positive | None = 1.0
    """The maximum norm of the gradient; null for no clipping."""
    precision: Literal["auto", "bf16", "float32", "pure_bf16"] = "auto"
    """auto: bf16 autocast on a GPU, float32 on a CPU. Weights are trained in float32, but for pure_bf16 (of a decoder
    only), in which they, their gradients and AdamW's moments are bf16 too: 8 bytes for each parameter in place of 16,
    and what changes a weight by less than about 1/500 of it is lost."""
    compile: bool | None = None
    """torch.compile; by default on a GPU, unless the step is a graph and every part has kernels of its own."""
    threads: Threads | None = None
    """CPU threads of a step, on a CPU; by default OMP_NUM_THREADS or else the fastest number, measured before the first
    step and kept in checkpoints. Another number rounds differently, and is otherwise the same run."""
    graph: bool | None = None
    """Replay the whole step as one CUDA graph; by default on a single GPU."""
    memory: Annotated[int, Range(at_least=0, at_most=100_000_000)] | None = None
    """How many tokens before its own chunk a row attends to, as in Transformer-XL: their keys and values are kept from
    the step before, and no gradient flows into them. By default a chunk's length where `data.chunking` is
    `consecutive`, else 0."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third slower."""
    dropout: Annotated[Choice, PartOf(dropout_schedules, "constant")] = "constant"  # type: ignore[assignment]
    """The model's dropout rates over the training."""
    temperature: Annotated[Choice, PartOf(schedules, "constant")] = "constant"  # type: ignore[assignment]
    """The temperature of Gumbel joins over the training, as a share of the configured one, in twenty even steps."""
    opening: Share = 0.1
    """The share of the training over which modules that were inserted (`braid edit insert`) come into use: a factor on
    their probability goes from 0 to 1. 0: they are used from the first step on."""
    routing_losses: dict[str, NonNegative] | None = None
    """Losses of all routers with their weights, in place of the model's own, which the trained model then has as its
    own: {load_concentration: 0.001}."""
    losses: list[Annotated[Choice, PartOf(extra_losses, by_key=True)]] = field(default_factory=list)
    """What is added to the loss of the text, each with its weight: `- early_exit: {weight: 0.2}`."""
    freeze: list[Freezable] = field(default_factory=list)
    """Parts that keep their weights, beside the folder's own. `joins` includes projections and the last norm; `blocks`
    is all between embedding and head, and `routers` those of experts, both but for what was inserted."""
    train: Literal["all", "gates"] = "all"
    """What is trained: all that is not frozen, or the model's gates alone."""
    lora: LoraTrainingConfig | None = None
    """Train adapters in place of the model's own weights; checkpoints have them merged, and beside them alone. Those of
    a decoder have the adapters alone, and name their base."""
    distill: DistillConfig | None = None
    """Learn from the probabilities of other models: `{teachers: [runs/a, runs/b]}`."""

    def __post_init__(self) -> None:
        check_losses(self.routing_losses or ())
        if twice := sorted(name for name, count in Counter(loss.kind for loss in self.losses).items() if count > 1):
            raise BraidError(f"losses: '{twice[0]}' is listed twice")
        if self.budget.count < 1:
            raise BraidError("budget must be at least 1")


@dataclass
class CheckpointConfig:
    """When the run is saved."""

    every: Pace = field(default_factory=lambda: Pace.from_shorthand("500 steps"))
    """`500 steps`, or `1M words to 10M, then 10M`; each mark is met exactly. The end is always saved."""
    keep: Count | None = 3
    """How many model folders to keep (the newest, and at least two in case one is damaged); null keeps all."""


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
        if self.training.lora is not None and self.start_from is None and self.decoder is None:
            raise BraidError(
                "training.lora adapts a trained model",
                todo="Name one: start_from=MODEL, or leave out training.lora to train a new one.",
            )
        if self.training.lora is not None and self.training.optimizer.kind == "muon":
            raise BraidError(
                "training.lora: Muon trains whole matrices, and adapters are two thin ones whose product counts",
                todo="Leave out training.optimizer.kind, so that AdamW trains the adapters.",
            )
        if self.decoder is not None:
            self._check_decoder()
        elif self.training.precision == "pure_bf16":
            raise BraidError("training.precision: pure_bf16 is for decoders; Braid's models train in float32 or bf16")
        check_lengths(self.training.lengths, self.data.length)
        if self.training.lengths and self.memory:
            raise BraidError(
                "training.lengths: rows with a memory of the text before them keep their length",
                todo="Leave out training.lengths, or the memory (data.chunking=consecutive, training.memory).",
            )
        if self.data.pauses and self.training.distill is not None and self.training.distill.top_k is not None:
            raise BraidError(
                "training.distill.top_k stores what teachers say of text without pauses",
                todo="Leave out top_k, so that the teachers read every step's sequences, or data.pauses.",
            )
        if self.training.memory and not self._keeps_rows:
            raise BraidError(
                "training.memory: a row has a memory only where it goes on with its text from step to step",
                todo="Add data.chunking=consecutive.",
            )

    def _check_decoder(self) -> None:
        """Refuse options that only Braid's models have."""
        training = self.training
        if self.start_from is not None:
            raise BraidError("start_from is a Braid model, and decoder is one of transformers: give one of them")
        if training.lora is not None and training.train == "gates":
            raise BraidError("training.lora trains adapters and gates, and training.train: gates only these: give one")
        given = {
            "data.chunking": self._keeps_rows,
            "training.memory": bool(training.memory),
            "training.losses": bool(training.losses),
            "training.routing_losses": training.routing_losses is not None,
            "training.distill": training.distill is not None,
            "training.freeze": bool(training.freeze),
            "training.dropout": training.dropout.kind != "constant",
            "training.temperature": training.temperature.kind != "constant",
            "training.graph": bool(training.graph),
        }
        if named := [name for name, is_given in given.items() if is_given]:
            raise BraidError(
                f"{', '.join(named)}: only Braid's models have this, and a decoder of transformers is trained as it is",
                todo="Leave it out; `training.train: gates` and `training.lora` say what of a decoder is trained.",
            )

    @property
    def memory(self) -> int:
        """How many tokens before its chunk a row attends to."""
        if self.training.memory is not None:
            return self.training.memory
        return self.data.length if self._keeps_rows else 0

    @property
    def _keeps_rows(self) -> bool:
        return bool(chunkings[self.data.chunking.kind].keeps_rows)

    @property
    def folder(self) -> str:
        return self.out or f"runs/{self.name}"


@dataclass
class LoadedRecipe:
    """A recipe with its model decoded."""

    recipe: Recipe
    model: RecipeModel | None
    """None where the model is the one to start from, or a decoder."""

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
    data = compose_recipe(name, overrides)
    if is_preset(data):
        advice = f"Use it in a recipe of a run: `defaults: [/models/{Path(name).stem}@model, _self_]`."
        raise BraidError("this is a model without data and training", name, advice)
    return decode_recipe(data)


def decode_recipe(data: dict[str, Any]) -> LoadedRecipe:
    """A recipe from plain data."""
    problems: list[str] = []
    decoded, model = None, data.get("model")
    if isinstance(model, (dict, RecipeModel)):
        with collecting(problems):
            decoded = decode_model(model)
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
