"""The next thought in latent space: from the stream over one sentence, predict that over the next one."""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.data.tokenizing.tokenizer import PAUSE, BraidTokenizer
from braidlm.model.config.ranges import NonNegative, Size
from braidlm.model.heads.losses import IGNORED, share_of_batch
from braidlm.model.language_model import LanguageModel
from braidlm.training.features.extra_losses import ExtraLoss, ExtraLossConfig, TrainingPass, extra_losses

SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f]['\"\u201d\u2019)\]]*\s*$")
"""The end of a token that ends a sentence: a mark, in Latin or Chinese script, and what closes a quotation."""


@extra_losses.register("next_sentence")
class NextSentence(ExtraLoss):
    """1 - the cosine of the next sentence's mean state and what a small network predicts for it from this sentence's.

    The target is the same model's state, without a gradient and without the mean over all sentences of the micro-batch:
    what sentences have in common is nothing to predict. A prediction that is always the same costs 1.
    """

    @dataclass
    class Config(ExtraLossConfig):
        """Its weight, and the network that predicts."""

        weight: NonNegative = 0.1
        """Its factor in the sum of all losses."""
        hidden: Size | None = None
        """The inner size of the network that predicts; by default twice the model's width."""

    ends: Tensor  # [vocabulary]: whether a token ends a sentence
    breaks: Tensor  # [vocabulary]: whether a token stands between texts
    spread: Tensor  # how different the sentences of the last micro-batch are, see `readings`

    def __init__(self, config: Config, model: LanguageModel):
        super().__init__(config, model)
        width, vocabulary = model.model.width_out, torch.zeros(model.config.vocab_size, dtype=torch.bool)
        inner = config.hidden or 2 * width
        self.predict = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        for name, values in (("ends", vocabulary), ("breaks", vocabulary.clone()), ("spread", torch.zeros(()))):
            self.register_buffer(name, values, persistent=False)

    def read_tokenizer(self, tokenizer: BraidTokenizer) -> None:
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        self.ends[: len(texts)] = torch.tensor([SENTENCE_END.search(text) is not None for text in texts])
        special = [tokenizer.backend.token_to_id(token) for token in tokenizer.special.order if token != PAUSE]
        self.breaks[special] = True

    def forward(self, done: TrainingPass) -> Tensor:
        states, whole = mean_states(done.hidden, self.ends[done.inputs], self.breaks[done.inputs])
        targets = states.detach()
        self.spread.copy_(spread(targets, whole))
        targets = targets - _mean(targets, whole)
        predicted = self.predict(states[:, :-1])
        distance = 1.0 - F.cosine_similarity(predicted.float(), targets[:, 1:], dim=-1)
        pairs = whole[:, :-1] & whole[:, 1:]
        mean = torch.where(pairs, distance, 0.0).sum() / pairs.sum().clamp_min(1)
        return mean * share_of_batch(done.labels != IGNORED, done.count)

    def readings(self) -> dict[str, float]:
        """How different the sentences' states are: 0 if all point one way (a collapse), towards 1 if to all sides."""
        return {"spread": self.spread.item()}


def mean_states(hidden: Tensor, ends: Tensor, breaks: Tensor) -> tuple[Tensor, Tensor]:
    """The mean state [row, sentence, width] of each sentence of a stream [row, time, width], and which are whole.

    `ends` [row, time] are the last tokens of sentences, `breaks` the tokens between texts: each is a sentence of its
    own that is not whole, as is what comes before it without an end, and the last of a row. The first of a row may
    begin in its middle. There are as many sentences as tokens, most of them empty, so that shapes never change.
    """
    last = ends | breaks
    number = last.cumsum(1) - last.long()
    states = torch.zeros_like(hidden, dtype=torch.float32)
    states = states.scatter_add(1, number[..., None].expand_as(hidden), hidden.float())
    tokens, ended, broken = (
        torch.zeros_like(number).scatter_add(1, number, each.long()) for each in (torch.ones_like(ends), ends, breaks)
    )
    return states / tokens.clamp_min(1)[..., None], (ended > 0) & (broken == 0)


def spread(states: Tensor, whole: Tensor) -> Tensor:
    """1 - the squared length of the mean of unit vectors."""
    return 1.0 - _mean(F.normalize(states, dim=-1), whole).square().sum()


def _mean(states: Tensor, whole: Tensor) -> Tensor:
    """The mean state [width] of whole sentences."""
    return (states * whole[..., None]).sum((0, 1)) / whole.sum().clamp_min(1)
