"""Teachers: frozen language models, Braid's or any of transformers, that read with the tokenizer of the data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.card import licence_record
from braidlm.core.models.folders import load_lineage
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences
from braidlm.kernels.lower import lower_forward
from braidlm.kernels.ops.soft_head_loss import averaged_logs
from braidlm.model.config.ranges import NonNegative, Positive, Range, Share
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel, find_tokenizer
from braidlm.training.features.distill.divergence import averaged_log_probabilities

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel

TopK = Annotated[int, Range(at_least=1, at_most=65_536)]
TEACHER = "teacher"
"""The role of a source in a lineage."""


@dataclass
class TeacherConfig:
    """A model that teaches."""

    model: str
    """A model folder, a run, or a name on the Hub: any causal language model with the data's tokenizer."""
    weight: Positive = 1.0
    """Its share of the averaged probabilities, relative to those of the other teachers."""

    @classmethod
    def from_shorthand(cls, model: Any) -> dict[str, Any]:
        return {"model": model}


@dataclass
class DistillConfig:
    """Knowledge distillation: the model learns the probabilities of frozen teachers beside the text."""

    teachers: list[TeacherConfig]
    """Names of models, or {model, weight}; the probabilities of several are averaged."""
    weight: Share = 0.5
    """The teachers' share of the loss: weight x temperature^2 x KL(teachers || model), and 1 - weight of the text's."""
    temperature: Positive = 1.0
    """Divides the logits of both sides; above 1, improbable tokens teach more, and short trainings learn less."""
    hidden: NonNegative = 0.0
    """Adds this weight x the mean squared difference of the last hidden states, each normalised; where widths differ, a
    projection is learned beside the model. 0: not compared."""
    top_k: TopK | None = None
    """Store the teachers' most probable tokens of every position, this many, in the data section's `cache` before the
    training, and learn from those; all other tokens are one event. By default teachers run in every step."""

    def __post_init__(self) -> None:
        if not self.teachers:
            raise BraidError("teachers: name at least one model")
        if self.top_k is not None and self.hidden:
            raise BraidError(
                "`hidden` compares states that are not stored",
                todo="Leave out `top_k` to run the teachers in every step, or `hidden`.",
            )


@dataclass(frozen=True)
class Teacher:
    """A teacher that has been checked and not yet loaded."""

    opened: OpenedModel
    weight: float
    """The teacher's share of the average; those of all teachers add up to 1."""

    @property
    def name(self) -> str:
        return self.opened.title

    @property
    def folder(self) -> Path:
        return self.opened.folder

    @property
    def sha256(self) -> str:
        return self.opened.sha256

    def record(self) -> dict[str, Any]:
        """Which model the teacher is, for the lineage of what it taught."""
        licence = licence_record(self.folder)
        return {"model": self.name, "role": TEACHER, "weight": self.weight, "sha256": self.sha256, **licence}

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model in memory, frozen."""
        return self.opened.load(device).to(device=device, dtype=dtype).requires_grad_(False)


@dataclass(frozen=True)
class TeacherOutput:
    """What the teachers say of some rows."""

    log_probabilities: Tensor
    """[row, time, vocabulary] of the next token, at the temperature, averaged."""
    hidden: list[Tensor]
    """The last hidden states of each teacher [row, time, width], if they were asked for."""


class Teachers:
    """The teachers of a run, in memory."""

    def __init__(self, models: Sequence[Any], weights: Sequence[float], vocab_size: int, temperature: float):
        """`vocab_size` is the tokenizer's: what models have beyond it are rows of no token."""
        self.models, self.weights = list(models), list(weights)
        self.vocab_size, self.temperature = vocab_size, temperature
        self.lowered = _lowered(models)
        """All of them by kernels, or none."""

    @property
    def by_kernels(self) -> bool:
        """Whether kernels compute what they say of the next token, without waiting for the device."""
        return bool(self.lowered)

    @cached_property
    def widths(self) -> list[int]:
        """The widths of the last hidden states, which configurations of transformers call by many names."""
        token = torch.zeros(1, 1, dtype=torch.long, device=next(self.models[0].parameters()).device)
        return [hidden.shape[-1] for hidden in self.read(token, hidden=True).hidden]

    @torch.no_grad()
    def read(self, ids: Tensor, hidden: bool = False) -> TeacherOutput:
        """What they say of token ids [row, time]."""
        if not hidden:
            return TeacherOutput(self.log_probabilities(ids), [])
        outputs = [model(input_ids=ids, use_cache=False, output_hidden_states=True) for model in self.models]
        logits = (output.logits[..., : self.vocab_size] for output in outputs)
        averaged = averaged_log_probabilities(logits, self.weights, self.temperature)
        return TeacherOutput(averaged, [output.hidden_states[-1] for output in outputs])

    @torch.no_grad()
    def log_probabilities(self, ids: Tensor, start: int = 0) -> Tensor:
        """The averaged log-probabilities of the next token after each position of ids [row, time] from `start` on."""
        if self.by_kernels and self.temperature == 1:
            return averaged_logs(self.logits(ids, start), self.weights)
        logits = self.logits(ids, start) if self.by_kernels else self._plain_logits(ids, ids.shape[1] - start)
        return averaged_log_probabilities(logits, self.weights, self.temperature)

    def logits(self, ids: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """The logits of each teacher [row, time, vocabulary] after every position from `start` on, by kernels."""
        return tuple(lowered.logits(ids, start)[..., : self.vocab_size] for lowered in self.lowered)

    def _plain_logits(self, ids: Tensor, count: int) -> Iterator[Tensor]:
        """The logits of each teacher after the last `count` positions."""
        for model in self.models:
            # Models of other packages may compute all of them whatever they are asked for.
            cut = {"logits_to_keep": count} if "logits_to_keep" in signature(model.forward).parameters else {}
            yield model(input_ids=ids, use_cache=False, **cut).logits[:, -count:, : self.vocab_size]


def _lowered(models: Sequence[Any]) -> "list[LoweredModel]":
    """Models by kernels, if these serve all of every one: a part's plain forward may wait for the device."""
    found = [lower_forward(model, model.dtype) for model in models if isinstance(model, BraidForCausalLM)]
    whole = [lowered for lowered in found if lowered is not None and lowered.is_whole]
    return whole if len(whole) == len(models) else []


def find_teachers(config: DistillConfig, tokenizer: BraidTokenizer, length: int) -> list[Teacher]:
    """The teachers of a recipe, each checked by its configuration, its tokenizer and the header of its weights."""
    total = sum(teacher.weight for teacher in config.teachers)
    return [_find(teacher, teacher.weight / total, tokenizer, length) for teacher in config.teachers]


def _find(config: TeacherConfig, weight: float, tokenizer: BraidTokenizer, length: int) -> Teacher:
    opened = open_model(config.model, "own", bare=True)
    _check_tokenizer(config.model, opened.folder, tokenizer)
    opened.check()
    if opened.context is not None and opened.context < length:
        raise BraidError(
            f"data.length is {length}, and this teacher reads only {opened.context} tokens",
            config.model,
            "Lower data.length, or take a teacher that reads more.",
        )
    return Teacher(opened, weight)


def check_same_teachers(teachers: Sequence[Teacher], checkpoint: Path) -> None:
    """Refuse to go on with other teachers than a checkpoint had: a run that teaches may have been trained on."""
    sources = (load_lineage(checkpoint) or {}).get("sources") or []
    before = [source.get("sha256") for source in sources if source.get("role") == TEACHER]
    for had, teacher in zip(before, teachers, strict=False):
        if had != teacher.sha256:
            raise BraidError(
                "this teacher is another model now than when the run began",
                str(teacher.folder),
                "Go on with the one that it was, by its own folder, or begin a new run with another folder (out=DIR).",
            )


def _check_tokenizer(name: str, folder: Path, tokenizer: BraidTokenizer) -> None:
    """Probabilities can be learned only where one id is one token on both sides."""
    own = find_tokenizer(folder)
    if own is None:
        raise BraidError(
            "this teacher's folder has no tokenizer, so that its tokens cannot be compared with those of the data",
            name,
            "Put its tokenizer.json into the folder.",
        )
    if own.fingerprint != tokenizer.fingerprint:
        raise BraidError(
            "this teacher has another tokenizer than the data, and its probabilities are of other tokens: "
            + "; ".join(differences(tokenizer, own)),
            name,
            f"Prepare the data with the teacher's: data.tokenizer={folder}, or `braid prepare SOURCE --tokenizer "
            f"{folder} --out DIR`; all teachers need the same one.",
        )
