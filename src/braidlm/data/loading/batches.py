"""The batch of one optimizer step, and how it is cut at a mark in words or tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import raw_bits
from braidlm.data.tokenizing.tokenizer import PAUSE, BraidTokenizer

IGNORED = -100
"""The label of a position that is not trained."""


@dataclass(frozen=True)
class GlobalBatch:
    """A batch before any cut: this rank's tokens, and the words of all ranks."""

    tokens: np.ndarray
    """[rows of this rank, T + 1] int64."""
    words: np.ndarray
    """[global rows, T] uint8: words that begin in each input position."""
    sources: np.ndarray
    """[global rows]: the index of each row's data set in the loader's `names`."""
    first: int
    """This rank's first row among the global rows."""
    trained_lengths: np.ndarray
    """[global rows]: how many positions of each row are trained; fewer than T if an epoch ends within the row."""
    continues: np.ndarray
    """[rows of this rank] bool: whether the text of each row continues that of the same row one batch before."""
    positions: np.ndarray
    """[rows of this rank, T]: where the input tokens are in the file of the row's data set."""
    targets: np.ndarray | None = None
    """[global rows, T] bool: which labels are to be predicted; None if all are."""

    @property
    def own_sources(self) -> np.ndarray:
        """[rows of this rank]: the index of each row's data set."""
        return self.sources[self.first : self.first + len(self.tokens)]

    @property
    def trained_words(self) -> np.ndarray:
        """[positions that are trained], row by row: words that begin in each."""
        return self.trained(self.words)

    def trained(self, values: np.ndarray) -> np.ndarray:
        """[positions that are trained], row by row, of [global rows, T] values."""
        return values[np.arange(values.shape[1]) < self.trained_lengths[:, None]]

    def columns(self, start: int, length: int) -> "GlobalBatch":
        """The positions [start, start + length) of every row, as a batch of shorter rows."""
        columns = slice(start, start + length)
        return GlobalBatch(
            self.tokens[:, start : start + length + 1],
            self.words[:, columns],
            self.sources,
            self.first,
            np.clip(self.trained_lengths - start, 0, length),
            self.continues,
            self.positions[:, columns],
            None if self.targets is None else self.targets[:, columns],
        )

    def piece(self, start: int, stop: int) -> "Batch":
        """The part of the batch that trains only [start, stop) of all trained positions."""
        inputs, labels = self.tokens[:, :-1].copy(), self.tokens[:, 1:].copy()
        labels[~self.labelled(start, stop)[self.first : self.first + len(labels)]] = IGNORED
        return Batch(inputs, labels, self, start, stop)

    def labelled(self, start: int, stop: int) -> np.ndarray:
        """[global rows, T] bool: which positions have a label in the piece [start, stop)."""
        column = np.arange(self.words.shape[1])
        positions = (np.cumsum(self.trained_lengths) - self.trained_lengths)[:, None] + column
        inside = (column < self.trained_lengths[:, None]) & (positions >= start) & (positions < stop)
        return inside if self.targets is None else inside & self.targets


@dataclass(frozen=True)
class Batch:
    """One optimizer step: this rank's rows, and counts of the global batch, which are the same on every rank."""

    inputs: np.ndarray
    """[rows of this rank, T] int64; longer where there are pauses."""
    labels: np.ndarray
    """[rows of this rank, T] int64: the token that follows each input, or -100 where this piece does not train."""
    whole: GlobalBatch
    """The batch that this is a piece of, or all of."""
    start: int
    """First position that this piece trains, counted row by row over the trained positions of the global batch."""
    stop: int
    """The position after the last one that this piece trains."""

    @property
    def word_count(self) -> int:
        """Words of this piece, over all ranks."""
        return int(self.whole.trained_words[self.start : self.stop].sum(dtype=np.int64))

    @property
    def token_count(self) -> int:
        """Positions of this piece that are trained, over all ranks, with those of prompts: what budgets count."""
        return self.stop - self.start

    @property
    def target_count(self) -> int:
        """Labels of this piece, over all ranks: what a sum of losses is divided by, so at least 1."""
        if self.whole.targets is None:
            return self.token_count
        return max(int(self.whole.trained(self.whole.targets)[self.start : self.stop].sum()), 1)

    @property
    def is_last_piece(self) -> bool:
        """Whether this piece ends the batch."""
        return self.stop == int(self.whole.trained_lengths.sum())


def cut_at(words: np.ndarray, start: int, words_left: int | None, tokens_left: int | None) -> int:
    """The end of the piece that begins at flat position `start`, so that it passes neither mark.

    A cut at a number of words is just before the next word, so the last word is whole. A token in which several words
    begin cannot be cut: it belongs to the piece that it completes.
    """
    if any(left is not None and left < 1 for left in (words_left, tokens_left)):
        raise ValueError("a mark that is already met leaves nothing to train")
    flat = words.reshape(-1)
    stop = flat.size if tokens_left is None else min(flat.size, start + tokens_left)
    if words_left is None:
        return stop
    counts = flat[start:stop]
    if int(counts.sum(dtype=np.int64)) <= words_left:
        return stop
    last_word = int(np.searchsorted(np.cumsum(counts, dtype=np.int64), words_left))
    begins = counts[last_word + 1 :] > 0
    return start + last_word + 1 + int(begins.argmax()) if begins.any() else stop


@dataclass(frozen=True)
class Pauses:
    """Pause tokens in training sequences: time to compute before a token is predicted (Goyal et al., arXiv 2310.02226).

    Pauses stand at random places among the tokens of a sequence, which depend on the seed and the piece of text alone.
    The token after a run of pauses is predicted from the last of them; no pause is ever predicted.
    """

    token: int
    count: int
    """How many pauses each sequence has."""
    seed: int

    def insert(self, batch: Batch, names: Sequence[str]) -> Batch:
        """The batch with pauses: inputs and labels [row, time] become longer by `count`."""
        rows, text = batch.inputs.shape
        after = self._pauses_after(batch, names)
        # An input is preceded by the pauses of those before it; its label moves to the last pause after it.
        places = np.arange(text) + np.cumsum(after, axis=1) - after
        inputs = np.full((rows, text + self.count), self.token, batch.inputs.dtype)
        labels = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, places, batch.inputs, axis=1)
        np.put_along_axis(labels, places + after, batch.labels, axis=1)
        return replace(batch, inputs=inputs, labels=labels)

    def _pauses_after(self, batch: Batch, names: Sequence[str]) -> np.ndarray:
        """[row, text]: how many pauses follow each token."""
        text, whole = batch.inputs.shape[1], batch.whole
        begins = zip(whole.own_sources, whole.positions[:, 0], strict=True)
        keys = [(names[source], int(position)) for source, position in begins]
        chosen = [(raw_bits(self.count, "pauses", self.seed, *key) % text).astype(np.int64) for key in keys]
        return np.stack([np.bincount(row, minlength=text) for row in chosen])


def make_pauses(rate: float, length: int, tokenizer: BraidTokenizer, seed: int) -> Pauses | None:
    """The pauses of sequences of `length` tokens, a share `rate` of which are pauses; None where that is 0."""
    if not rate:
        return None
    if tokenizer.pause_id is None:
        raise BraidError(
            f"data.pauses needs a tokenizer that has the special token {PAUSE}",
            todo="Give it one where the text is prepared: in the recipe data.tokenizer.special_tokens="
            f"'[eos=<|endoftext|>, pad=<|pad|>, {PAUSE}]', or `braid prepare ... --special {PAUSE}` beside the others.",
        )
    count = round(rate * length)
    if not 0 < count < length:
        raise BraidError(f"data.pauses is {rate:g}, which is {count} of the {length} tokens of a sequence")
    return Pauses(tokenizer.pause_id, count, seed)
