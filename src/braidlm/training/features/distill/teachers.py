"""Teachers: frozen language models, Braid's or any of transformers, that read with the tokenizer of the data."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.card import licence_record
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences
from braidlm.kernels.lower import lower_forward
from braidlm.kernels.ops.soft_head_loss import averaged_logs
from braidlm.model.config.ranges import NonNegative, Positive, Range, Share
from braidlm.model.language_model import LanguageModel
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel, find_tokenizer

if TYPE_CHECKING:
    pass

TopK = Annotated[int, Range(at_least=1, at_most=65_536)]
TEACHER = "teacher"  # the role of a source in a lineage
MAX_LOGITS = 1 << 25  # the logits of one slice: 128 MB in float32 for each model


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
            what = "`hidden` compares states that are not stored"
            raise BraidError(what, todo="Leave out `top_k` to run the teachers in every step, or `hidden`.")


@dataclass(frozen=True)
class Teacher:
    """A teacher that has been checked and not yet loaded."""

    opened: OpenedModel
    weight: float  # the teacher's share of the average; those of all teachers add up to 1

    def record(self) -> dict[str, Any]:
        """Which model the teacher is, for the lineage of what it taught."""
        known = {"model": self.opened.title, "role": TEACHER, "weight": self.weight, "sha256": self.opened.sha256}
        return known | licence_record(self.opened.folder)

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model in memory, frozen."""
        return self.opened.load(device).to(device=device, dtype=dtype).requires_grad_(False)


def find_teachers(config: DistillConfig, tokenizer: BraidTokenizer, length: int) -> list[Teacher]:
    """The teachers of a recipe, each checked by its configuration, its tokenizer and the header of its weights."""
    total, found = sum(teacher.weight for teacher in config.teachers), []
    for teacher in config.teachers:
        opened = open_model(teacher.model, "own", bare=True)
        _check_tokenizer(teacher.model, opened, tokenizer)
        opened.check()
        if opened.context is not None and opened.context < length:
            what = f"data.length is {length}, and this teacher reads only {opened.context} tokens"
            raise BraidError(what, teacher.model, "Lower data.length, or take a teacher that reads more.")
        found.append(Teacher(opened, teacher.weight / total))
    return found


def _check_tokenizer(name: str, opened: OpenedModel, tokenizer: BraidTokenizer) -> None:
    """Probabilities can be learned only where one id is one token on both sides."""
    own, folder = find_tokenizer(opened.folder), opened.folder
    if own is None:
        what = "this teacher's folder has no tokenizer, so that its tokens cannot be compared with those of the data"
        raise BraidError(what, name, "Put its tokenizer.json into the folder.")
    if own.fingerprint != tokenizer.fingerprint:
        raise BraidError(
            "this teacher has another tokenizer than the data, and its probabilities are of other tokens: "
            + "; ".join(differences(tokenizer, own)),
            name,
            f"Prepare the data with the teacher's: data.tokenizer={folder}, or `braid prepare SOURCE --tokenizer "
            f"{folder} --out DIR`; all teachers need the same one.",
        )


class Teachers:
    """The teachers of a run, in memory."""

    def __init__(self, models: Sequence[Any], weights: Sequence[float], vocab_size: int, temperature: float):
        """`vocab_size` is the tokenizer's: what models have beyond it are rows of no token."""
        self.models, self.weights = list(models), list(weights)
        self.vocab_size, self.temperature = vocab_size, temperature
        found = (lower_forward(model, model.dtype) for model in models if isinstance(model, LanguageModel))
        whole = [lowered for lowered in found if lowered is not None and lowered.is_whole]
        # All models by kernels, or none: a part's plain forward may wait for the device.
        self.lowered = whole if len(whole) == len(models) else []

    @cached_property
    def widths(self) -> list[int]:
        """The widths of the last hidden states, which configurations of transformers call by many names."""
        token = torch.zeros(1, 1, dtype=torch.long, device=next(self.models[0].parameters()).device)
        return [hidden.shape[-1] for hidden in self.read(token)[1]]

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The averaged log-probabilities after ids [row, time], and each teacher's last states [row, time, width]."""
        outputs = [model(input_ids=ids, use_cache=False, output_hidden_states=True) for model in self.models]
        logits = (output.logits[..., : self.vocab_size] for output in outputs)
        averaged = averaged_log_probabilities(logits, self.weights, self.temperature)
        return averaged, [output.hidden_states[-1] for output in outputs]

    @torch.no_grad()
    def log_probabilities(self, ids: Tensor, start: int = 0) -> Tensor:
        """The averaged log-probabilities of the next token after each position of ids [row, time] from `start` on."""
        if self.lowered and self.temperature == 1:
            return averaged_logs(self.logits(ids, start), self.weights)
        logits = self.logits(ids, start) if self.lowered else self._plain_logits(ids, ids.shape[1] - start)
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


def averaged_log_probabilities(logits: Iterable[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
    """The logarithm of the teachers' probabilities [..., vocabulary], averaged by weights that add up to 1. Logits that
    are computed as they are asked for are dropped one by one. They have no gradient."""
    scaled = (each if temperature == 1 else each.float() / temperature for each in logits)
    logs = (
        torch.log_softmax(each, -1, dtype=torch.float32).add_(math.log(weight))
        for each, weight in zip(scaled, weights, strict=True)
    )
    return functools.reduce(torch.logaddexp, logs)


def slices_of(rows: int, length: int, vocab_size: int, max_logits: int = MAX_LOGITS) -> list[slice]:
    """Whole sequences, as many at a time as have at most `max_logits` logits, and at least one."""
    size = max(1, max_logits // (length * vocab_size))
    return [slice(begin, begin + size) for begin in range(0, rows, size)]
