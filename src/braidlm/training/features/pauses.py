"""Pause tokens in training sequences: time to compute before a token is predicted (Goyal et al., arXiv 2310.02226).

Pauses stand at random places among the tokens of a sequence, which has its length with them. The token after a run of
pauses is predicted from the last of them; no pause is ever predicted, so that what counts is the text alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED, Batch
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.streams import raw_bits
from braidlm.data.tokenizing.tokenizer import PAUSE
from braidlm.training.features.feature import Feature, Setup, feature


@feature("data.pauses")
class Pauses(Feature):
    """How many pauses a sequence has; their places depend only on the seed and on the piece of text."""

    order = -1  # other features read the batch with pauses

    def __init__(self, token: int, count: int, seed: int, names: Sequence[str]):
        """`count` pauses are in each sequence; `names` are those of the data sets, in the order of batches."""
        self.token, self.count, self.seed, self.names = token, count, seed, names

    @classmethod
    def is_asked(cls, training: Any, data: DataConfig | None) -> bool:
        return data is not None and data.pauses > 0

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        if setup.data is None or setup.opened is None or not setup.data.pauses:
            return []
        tokenizer, rate, length = setup.opened.tokenizer, setup.data.pauses, setup.data.length
        if tokenizer.pause_id is None:
            raise BraidError(
                f"data.pauses needs a tokenizer that has the special token {PAUSE}",
                todo="Give it one where the text is prepared: in the recipe data.tokenizer.special_tokens="
                f"'[eos=<|endoftext|>, pad=<|pad|>, {PAUSE}]', or `braid prepare ... --special {PAUSE}` beside the "
                "others.",
            )
        count = round(rate * length)
        if not 0 < count < length:
            raise BraidError(f"data.pauses is {rate:g}, which is {count} of the {length} tokens of a sequence")
        names = sorted(stream.name for stream in setup.opened.train)
        return [cls(tokenizer.pause_id, count, setup.seed, names)]

    def text_length(self, length: int) -> int:
        return length - self.count

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        """The batch with pauses: inputs and labels [row, time] become longer by `count`."""
        rows, text = batch.inputs.shape
        after = self._pauses_after(batch)
        # An input is preceded by the pauses of those before it; its label moves to the last pause after it.
        places = np.arange(text) + np.cumsum(after, axis=1) - after
        inputs = np.full((rows, text + self.count), self.token, batch.inputs.dtype)
        labels = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, places, batch.inputs, axis=1)
        np.put_along_axis(labels, places + after, batch.labels, axis=1)
        return replace(batch, inputs=inputs, labels=labels)

    def _pauses_after(self, batch: Batch) -> np.ndarray:
        """[row, text]: how many pauses follow each token."""
        text, whole = batch.inputs.shape[1], batch.whole
        begins = zip(whole.own_sources, whole.positions[:, 0], strict=True)
        keys = [(self.names[source], int(position)) for source, position in begins]
        chosen = [(raw_bits(self.count, "pauses", self.seed, *key) % text).astype(np.int64) for key in keys]
        return np.stack([np.bincount(row, minlength=text) for row in chosen])
