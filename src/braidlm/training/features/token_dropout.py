"""Token dropout: some of the tokens that are read are replaced, and the next token is predicted as before.

A text that is shown many times is learnt by heart from its exact contexts; with other tokens replaced in every step, no
context comes twice (word dropout: Bowman et al., arXiv 1511.06349). Validation reads the text as it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.streams import raw_bits
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.config.ranges import Rate
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.features.losses.masked import mask_token, ordinary_tokens


@dataclass
class TokenDropoutConfig:
    """How many tokens are replaced, and by what."""

    rate: Rate
    """The share of the tokens that is replaced at the beginning of the training."""
    final_rate: Rate | None = None
    """The share at the end of the training, to which it changes linearly; by default `rate`."""
    replaced_by: Literal["random", "mask"] = "random"
    """What takes a token's place: any token that is not special, or the tokenizer's mask token."""


@feature("training.token_dropout")
class TokenDropout(Feature):
    """Which tokens are replaced depends on the seed, the step and the row alone; special tokens never are."""

    @dataclass
    class Keys:
        token_dropout: TokenDropoutConfig | None = None
        """Replace a share of the tokens that are read, anew in every step: `{rate: 0.1}`. Against overfitting of text
        that is shown many times."""

    def __init__(self, config: TokenDropoutConfig, tokenizer: BraidTokenizer, seed: int):
        self.config, self.seed = config, seed
        self.step, self.rate = 0, config.rate
        self.ordinary = ordinary_tokens(tokenizer)
        is_mask = config.replaced_by == "mask"
        self.substitutes = np.array([mask_token(tokenizer, self.name)]) if is_mask else self.ordinary

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        config = training.token_dropout
        if config.rate == 0 and not config.final_rate:
            yield BraidError("training.token_dropout: with a rate of 0 nothing is replaced", todo="Leave it out.")

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        config = setup.training.token_dropout
        return [] if config is None or setup.opened is None else [cls(config, setup.opened.tokenizer, setup.seed)]

    def begin_step(self, step: int, share: float) -> bool:
        config, self.step = self.config, step
        final = config.rate if config.final_rate is None else config.final_rate
        self.rate = config.rate + (final - config.rate) * min(share, 1.0)
        return False

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        inputs = batch.inputs.copy()
        for number, row in enumerate(inputs, start=batch.whole.first):
            chosen, substitute = raw_bits(2 * row.size, "token dropout", self.seed, self.step, number).reshape(2, -1)
            taken = (chosen < np.uint64(self.rate * 2.0**64)) & np.isin(row, self.ordinary)
            row[taken] = self.substitutes[substitute[taken] % np.uint64(len(self.substitutes))]
        return replace(batch, inputs=inputs)
