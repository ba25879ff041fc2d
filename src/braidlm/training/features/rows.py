"""The rows of a training: shorter sequences at its beginning, and pauses among their tokens.

**Shorter sequences.** A sequence of the data is cut into several rows, and a step has as many tokens whatever their
length. The rows of a step are of different sequences, each of which is read to its end in the steps that follow, so
that an epoch is what it is without them. Attention over short rows costs less, and more of what is learnt follows
little text, as in a test of single sentences.

**Pauses** give time to compute before a token is predicted (Goyal et al., arXiv 2310.02226). They stand at random
places among the tokens of a sequence, which has its length with them. The token after a run of pauses is predicted from
the last of them; no pause is ever predicted, so that what counts is the text alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED, Batch
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.streams import raw_bits
from braidlm.data.tokenizing.tokenizer import PAUSE
from braidlm.model.config.ranges import Length, Probability
from braidlm.training.features.feature import Feature, Part, Setup, feature


@dataclass
class ShorterRows:
    """A part of the training with shorter sequences."""

    until: Probability
    """The share of the training at which this part ends, with the sequences that are begun."""
    length: Length
    """Tokens of a row; it divides `data.length`."""


@feature("training.lengths")
class Lengths(Feature):
    """The length of rows over the training."""

    @dataclass
    class Keys:
        lengths: list[ShorterRows] = field(default_factory=list)
        """Shorter sequences at first: `[{until: 0.5, length: 128}]` cuts every sequence of the data into rows of 128
        tokens until half of the training is done. A step has as many tokens, so that batch and rate need not change."""

    excludes: ClassVar = {
        "training.memory": (
            "rows with a memory of the text before them keep their length",
            "Leave out training.lengths, or the memory (data.chunking=consecutive, training.memory).",
        ),
        "data.pauses": ("pauses are counted for whole sequences", "Leave out training.lengths, or data.pauses."),
    }

    def __init__(self, setup: Setup):
        self.rows: Sequence[ShorterRows] = setup.training.lengths

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        ends = [rows.until for rows in training.lengths]
        if ends != sorted(set(ends)):
            yield BraidError("training.lengths: each part must end after the one before it; order them by `until`")
        for length in (rows.length for rows in training.lengths if data.length % rows.length):
            what = f"training.lengths: sequences of data.length, {data.length} tokens, do not make rows of {length}"
            yield BraidError(what, todo="Give a length that divides data.length.")

    def row_length(self, share: float) -> int | None:
        return next((rows.length for rows in self.rows if share < rows.until), None)

    def attended(self, parts: Sequence[Part]) -> Sequence[Part]:
        ((_, whole),) = parts
        ends = [0.0, *(rows.until for rows in self.rows), 1.0]
        lengths = [*(rows.length for rows in self.rows), whole]
        return [(end - begin, length) for begin, end, length in zip(ends[:-1], ends[1:], lengths, strict=True)]


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
        begins = zip(batch.whole.own_sources, batch.whole.positions[:, 0], strict=True)
        keys = [(self.names[source], int(position)) for source, position in begins]
        chosen = [(raw_bits(self.count, "pauses", self.seed, *key) % text).astype(np.int64) for key in keys]
        # [row, text]: pauses after each token, also where a batch has no rows.
        after = np.array([np.bincount(row, minlength=text) for row in chosen], np.int64).reshape(rows, text)
        # An input is preceded by the pauses of those before it; its label moves to the last pause after it.
        places = np.arange(text) + np.cumsum(after, axis=1) - after
        inputs = np.full((rows, text + self.count), self.token, batch.inputs.dtype)
        labels = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, places, batch.inputs, axis=1)
        np.put_along_axis(labels, places + after, batch.labels, axis=1)
        return replace(batch, inputs=inputs, labels=labels)
