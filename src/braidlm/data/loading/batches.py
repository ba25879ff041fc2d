"""The batch of one optimizer step, and how it is cut at a mark in words or tokens."""

from dataclasses import dataclass, replace

import numpy as np

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
    mean_counts: tuple[int, int] | None = None
    """Tokens and words of the mean batch, where rows are drawn by Poisson sampling; they count in place of its own."""

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
        return replace(
            self,
            tokens=self.tokens[:, start : start + length + 1],
            words=self.words[:, columns],
            trained_lengths=np.clip(self.trained_lengths - start, 0, length),
            positions=self.positions[:, columns],
            targets=None if self.targets is None else self.targets[:, columns],
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
        if self.whole.mean_counts is not None:
            return self.whole.mean_counts[1]
        return int(self.whole.trained_words[self.start : self.stop].sum(dtype=np.int64))

    @property
    def token_count(self) -> int:
        """Positions of this piece that are trained, over all ranks, prompts included: what budgets count."""
        return self.stop - self.start if self.whole.mean_counts is None else self.whole.mean_counts[0]

    @property
    def target_count(self) -> int:
        """Labels of this piece, over all ranks: what a sum of losses is divided by, so at least 1."""
        if self.whole.targets is None:
            return max(self.stop - self.start, 1)
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
