"""Sections of a recipe beside data and model: how a run is trained, saved, validated, sampled and logged."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from braidlm.core.errors import BraidError
from braidlm.data.loading.halves import Half
from braidlm.model.config.ranges import Count, NonNegative, Positive, Range, Rate, Rows, Size, Temperature
from braidlm.model.config.registry import Choice, import_files
from braidlm.model.config.strict import PartOf
from braidlm.model.freezing import Freezable
from braidlm.model.routing.losses import check_losses
from braidlm.training.amounts import Amount, Pace
from braidlm.training.features.feature import with_features
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

    @property
    def scale(self) -> float:
        """The factor of what is added."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


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
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third slower."""
    routing_losses: dict[str, NonNegative] | None = None
    """Losses of all routers with their weights, in place of the model's own, which the trained model then has as its
    own: {load_concentration: 0.001}."""
    freeze: list[Freezable] = field(default_factory=list)
    """Parts that keep their weights, beside the folder's own. `joins` includes projections and the last norm; `blocks`
    is all between embedding and head, and `routers` those of experts, both but for what was inserted."""
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
