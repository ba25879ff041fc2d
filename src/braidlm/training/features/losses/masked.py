"""GPT-BERT's hybrid objective (arXiv 2410.24159): rows that see both ways, in which masked tokens are predicted.

A masked token is predicted at the position before it (masked next-token prediction), so that one head and all weights
serve both kinds of rows. The loss of the text is that of the other rows, and validation is causal.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.streams import raw_bits
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.config.ranges import Probability, Range
from braidlm.model.heads.losses import IGNORED
from braidlm.model.language_model import LanguageModel
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass, extra_losses
from braidlm.training.step.objective import check_two_way

SHOWN = IGNORED - 1
"""The label of a position whose next token is not masked: it is text, which routers are balanced on, without a loss."""
WHERE = "training.losses: masked"


@dataclass
class MaskedConfig:
    """Which rows and tokens are masked. Each row counts as much as any other in the sum of losses."""

    share: Annotated[float, Range(above=0, below=1)] = 0.5
    """The share of the rows that see both ways, in whole rows of a micro-batch; 15/16 in the paper's own model."""
    rate: Probability = 0.3
    """The share of such a row's tokens that is masked at the beginning of the training."""
    final_rate: Probability = 0.15
    """The share at the end of the training; between them it changes linearly."""
    replaced_by: Literal["mixed", "mask"] = "mixed"
    """What takes the place of a masked token: the mask token, a random one and itself, 8 : 1 : 1 (BERT), or always the
    mask token."""
    token: str | None = None
    """The mask token; by default the special token with the role `mask`."""


@extra_losses.register("masked")
class Masked(ExtraLoss):
    """The next-token loss of masked tokens in rows that see both ways, which take the place of causal rows."""

    Config = MaskedConfig
    config: MaskedConfig
    # Rows that see both ways have no memory of the text before, teachers read forward, and rows are counted.
    excludes: ClassVar = dict.fromkeys(
        ("training.memory", "training.distill", "training.lengths"), ("", "Leave out one of them.")
    )
    texts: Tensor  # the labels of causal rows in the whole batch
    masked: Tensor  # the masked tokens in the whole batch

    def __init__(self, config: MaskedConfig, model: LanguageModel):
        super().__init__(config, model)
        check_two_way(model.model, WHERE)
        self.text_weight = 1.0 - config.share
        self.rows, self.seed, self.step, self.rate, self.token = 0, 0, 0, config.rate, 0
        self.ordinary = np.arange(model.config.vocab_size)
        """The tokens that may take the place of another: all that are not special."""
        self.register_buffer("texts", torch.ones(()), persistent=False)
        self.register_buffer("masked", torch.ones(()), persistent=False)

    @property
    def factor(self) -> float:
        return self.config.share

    def text_count(self, count: Tensor) -> Tensor:
        return self.texts

    def begin_run(self, rows: int, seed: int) -> None:
        if rows < 2:
            todo = "Take a larger training.batch, and fewer micro-batches (training.accumulation)."
            raise BraidError("a micro-batch of one row cannot have causal rows and masked ones", WHERE, todo)
        self.rows, self.seed = rows, seed
        self.taken_rows = min(max(round(self.config.share * rows), 1), rows - 1)

    def read_tokenizer(self, tokenizer: BraidTokenizer) -> None:
        self.token = mask_token(tokenizer, WHERE, self.config.token)
        self.ordinary = ordinary_tokens(tokenizer)

    def begin_step(self, step: int, share: float) -> bool:
        self.step = step
        self.rate = self.config.rate + (self.config.final_rate - self.config.rate) * min(share, 1.0)
        return False

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        """The rows of each micro-batch in a random order, the last ones masked. Every process draws all rows' order, so
        that it knows the counts of the whole batch."""
        labelled = batch.whole.labelled(batch.start, batch.stop)
        order = raw_bits(len(labelled), "masked rows", self.seed, self.step).reshape(-1, self.rows).argsort(1)
        order += self.rows * np.arange(len(order))[:, None]
        causal, two_way = order[:, : -self.taken_rows], order[:, -self.taken_rows :]
        self.texts.fill_(max(int(labelled[causal.ravel()].sum()), 1))
        self.masked.fill_(max(int(masked_counts(labelled[two_way.ravel()], self.rate).sum()), 1))
        first, last = (row // self.rows for row in (batch.whole.first, batch.whole.first + len(batch.inputs)))
        mine = order[first:last].ravel() - batch.whole.first
        inputs, labels = batch.inputs[mine], batch.labels[mine]
        for number, end in enumerate(range(self.rows, len(inputs) + 1, self.rows), start=first):
            taken = slice(end - self.taken_rows, end)
            inputs[taken], labels[taken] = self.mask(inputs[taken], labels[taken], number)
        return replace(batch, inputs=inputs, labels=labels)

    def mask(self, inputs: np.ndarray, labels: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [row, time] with masked tokens, and the labels of these alone, for a micro-batch of the whole batch."""
        bits = raw_bits(3 * inputs.size, "masked tokens", self.seed, self.step, number).reshape(3, *inputs.shape)
        chosen = choose(labels != IGNORED, self.rate, bits[0])
        tokens = np.full_like(inputs, self.token)
        if self.config.replaced_by == "mixed":
            tenth = bits[1] % 10
            tokens = np.where(tenth == 8, self.ordinary[bits[2] % len(self.ordinary)], tokens)
            tokens = np.where(tenth == 9, inputs, tokens)
        masked = inputs.copy()
        masked[:, 1:][chosen[:, :-1]] = tokens[:, 1:][chosen[:, :-1]]
        # In a causal row no token sees those after the last one that is trained; here all would.
        later = np.cumsum((labels != IGNORED)[:, ::-1], axis=1)[:, ::-1] == 0
        masked[:, 1:][later[:, :-1]] = self.token
        return masked, np.where(chosen, labels, np.where(labels != IGNORED, SHOWN, IGNORED))

    def forward(self, done: TrainingPass) -> Tensor:
        taken = done.taken
        assert taken is not None
        # The head reads as many positions of each row as may be masked, so that shapes never change.
        most = max(round(max(self.config.rate, self.config.final_rate) * (taken.labels.shape[1] - 1)), 1)
        index = (taken.labels < 0).byte().argsort(dim=1, stable=True)[:, :most]
        hidden = taken.hidden.gather(1, index[..., None].expand(-1, -1, taken.hidden.shape[-1]))
        labels = taken.labels.gather(1, index)
        return done.model.head.loss(hidden, labels.masked_fill(labels < 0, IGNORED), self.masked)


def mask_token(tokenizer: BraidTokenizer, where: str, name: str | None = None) -> int:
    """The id of the mask token, which has the role `mask` or the name that is given."""
    name = name or tokenizer.special.mask
    if name not in tokenizer.special.order:
        what = f"'{name}' is no special token of the tokenizer" if name else "the tokenizer has no mask token"
        todo = "Give it one under data.tokenizer: `special_tokens: [eos=<|endoftext|>, pad=<|pad|>, mask=<mask>]`."
        raise BraidError(what, where, todo)
    return tokenizer.backend.token_to_id(name) or 0


def ordinary_tokens(tokenizer: BraidTokenizer) -> np.ndarray:
    """The ids of all tokens that are not special."""
    special = [tokenizer.backend.token_to_id(token) or 0 for token in tokenizer.special.order]
    return np.setdiff1d(np.arange(tokenizer.vocab_size), special)


def masked_counts(labelled: np.ndarray, rate: float) -> np.ndarray:
    """[row]: how many tokens of each row are masked, at least one, where `labelled` [row, time] have labels. The token
    that the last position predicts is no input, so that it cannot be masked."""
    tokens = labelled[:, :-1].sum(1)
    return np.minimum(np.maximum(np.rint(rate * tokens).astype(np.int64), 1), tokens)


def choose(labelled: np.ndarray, rate: float, bits: np.ndarray) -> np.ndarray:
    """[row, time]: the positions whose next token is masked, drawn by random `bits` from those with a label."""
    can = labelled.copy()
    can[:, -1] = False
    order = np.where(can, bits >> np.uint64(1), np.iinfo(np.uint64).max).argsort(1, kind="stable")
    chosen = np.zeros_like(can)
    np.put_along_axis(chosen, order, np.arange(can.shape[1]) < masked_counts(labelled, rate)[:, None], axis=1)
    return chosen
