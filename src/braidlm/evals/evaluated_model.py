"""A model as tasks see it, in memory with its tokenizer, and the settings of its evaluation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from braidlm.data.loading.halves import Half
from braidlm.data.sources.format import TEMPLATE
from braidlm.model.config.ranges import Count, CountOrZero, Length, Pauses, Probability, Range, Rows, Temperature
from braidlm.model.config.strict import decode

if TYPE_CHECKING:  # the command line reads `Settings` and does not need torch
    import torch

    from braidlm.data.tokenizing.tokenizer import BraidTokenizer
    from braidlm.evals.scoring.scorer import Scorer


@dataclass(frozen=True)
class Settings:
    """Settings of tasks; part of the key under which a result is cached."""

    allow_code_execution: bool = False
    """Whether programs that the model writes may be run."""
    code_isolation: Literal["required", "best"] = "required"
    """Whether they run only where the system can isolate them, or else with the best isolation there is."""
    code_samples: Annotated[int, Range(at_least=1, at_most=10_000)] = 10
    """How many programs a model writes for each problem; pass@k needs k."""
    code_temperature: Temperature = 0.2
    """What they are drawn with; 0 takes the most probable token."""
    code_top_p: Probability | None = 0.95
    """Only the most probable tokens that together have this much probability."""
    field: tuple[str, ...] = ("text",)
    """The fields of JSONL, CSV and parquet that make a document of text to score, as in `braid prepare`."""
    joiner: str = "\\n"
    """The text between several fields."""
    answer: str | None = None
    """The field of JSONL, CSV and parquet with the answer to the others: then only answers are scored."""
    template: str = TEMPLATE.replace("\n", "\\n")
    """With an answer: the text of a document, as in `braid prepare`."""
    separator: tuple[str, ...] = ("blank",)
    """What separates documents of text files: blank (lines), lines, file or a text; for some files PATTERN=S."""
    held_out: Probability | None = None
    """Only the share of packed documents that a recipe with this `holdout` never trains on."""
    half: Half | None = None
    """Only one half of a text to score, as a recipe's `validation.half`: blocks of 16 KiB are in the halves in turn."""
    max_tokens: Count | None = None
    """At most this many tokens of a text to score, in whole documents, as a recipe's `validation.tokens`; else all.
    Models of several tokenizers need `max_bytes`."""
    max_bytes: Count | None = None
    """At most this many bytes of a text to score, in whole documents (at least one): the same text for every
    model."""
    window: Length | None = None
    """Tokens of a text that are read at once; by default as many as in training, else the model's context."""
    pauses: Pauses = 0
    """Pause tokens between a question and its answer, for models trained with them (data.pauses): in multiple choice,
    last words, maths and code. They are never scored."""
    passages: Count = 500
    """Passages of a training text whose ends a model is to reproduce (memorisation)."""
    samples: CountOrZero = 256
    """Texts that are drawn from a model and looked up in its training text."""
    canaries: str | None = None
    """A file with a sentence in each line that was put into the training text; its digits are the secret."""
    reference: str | None = None
    """A model that was not trained on the text, whose losses membership is judged against."""
    shots: CountOrZero | None = None
    """Examples before each question of maths and of MBPP; by default as many as the task's paper gave."""
    finetune: Literal["full", "lora"] = "full"
    """What fine-tuning trains: all parameters (BabyLM 2025's numbers), or adapters (PaPaformer's numbers)."""
    seeds: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    """How often a model is fine-tuned, each time from another seed; the score is the mean."""
    finetune_epochs: Count | None = None
    """The most times that fine-tuning reads its examples; by default the paper's."""
    finetune_learning_rate: Annotated[float, Range(above=0, below=1)] | None = None
    """By default the paper's."""
    finetune_batch_size: Rows | None = None
    """Examples of one step; by default the paper's."""
    finetune_length: Annotated[int, Range(at_least=8, at_most=100_000_000)] | None = None
    """The most tokens of an example; by default the paper's."""
    finetune_patience: Count | None = None
    """Epochs without a better score after which fine-tuning ends; by default the paper's."""

    def __post_init__(self) -> None:
        decode(Settings, self)


@dataclass
class EvaluatedModel:
    scorer: "Scorer"
    tokenizer: "BraidTokenizer"
    folder: Path | None = None
    """The folder that it was loaded from, if any."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    @property
    def model(self) -> Any:
        return self.scorer.model

    @property
    def device(self) -> "torch.device":
        return self.scorer.device
