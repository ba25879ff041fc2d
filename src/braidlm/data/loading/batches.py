"""What one optimizer step sees, and the cut of a batch that crosses a mark of words or tokens."""

from dataclasses import dataclass

import numpy as np

IGNORED = -100
"""The label of a position that is not trained."""


@dataclass(frozen=True)
class Rows:
    """One whole batch before any cut: this rank's tokens, and every rank's words."""

    tokens: np.ndarray
    """[rows of this rank, T + 1] int64."""
    words: np.ndarray
    """[global rows, T] uint8: words that begin in each input position."""
    sources: np.ndarray
    """[global rows]: the index of each row's data set."""
    first: int
    """This rank's first row among the global rows."""
    shown: np.ndarray
    """[global rows]: how many positions of each row are trained; fewer than T where an epoch ends within a chunk."""

    @property
    def shown_words(self) -> np.ndarray:
        """[positions that are trained], row by row: words that begin in each."""
        return _shown(self.words, self.shown)

    def piece(self, start: int, stop: int) -> "Batch":
        """The batch with only the global positions [start, stop) trained, of those that are trained at all."""
        inputs, labels = self.tokens[:, :-1].copy(), self.tokens[:, 1:].copy()
        mine = slice(self.first, self.first + len(labels))
        column = np.arange(labels.shape[1])
        numbers = (np.cumsum(self.shown) - self.shown)[mine, None] + column
        labels[(column >= self.shown[mine, None]) | (numbers < start) | (numbers >= stop)] = IGNORED
        return Batch(inputs, labels, self.words, self.sources, self.shown, start, stop)


@dataclass(frozen=True)
class Batch:
    """One optimizer step: this rank's rows, and the facts of the global batch, which are the same on every rank."""

    inputs: np.ndarray
    """[rows of this rank, T] int64."""
    labels: np.ndarray
    """[rows of this rank, T] int64: the token that follows each input, or -100 where this piece does not train."""
    words: np.ndarray
    """[global rows, T] uint8: words that begin in each input position, of the whole batch also when it is cut."""
    sources: np.ndarray
    """[global rows]: the index of each row's data set in the loader's `names`."""
    shown: np.ndarray
    """[global rows]: how many positions of each row are trained."""
    start: int
    """First position that this piece trains, counted row by row over those of the global batch that are trained."""
    stop: int
    """The position after the last one that this piece trains."""

    @property
    def word_count(self) -> int:
        """Words of this piece, over all ranks."""
        return int(_shown(self.words, self.shown)[self.start : self.stop].sum(dtype=np.int64))

    @property
    def token_count(self) -> int:
        """Positions of this piece, over all ranks."""
        return self.stop - self.start

    @property
    def label_count(self) -> int:
        """Labels of this piece, over all ranks: what a sum of losses is divided by."""
        return self.stop - self.start

    @property
    def is_last_piece(self) -> bool:
        """Whether the whole batch has been trained after this piece."""
        return self.stop == int(self.shown.sum())


def _shown(words: np.ndarray, shown: np.ndarray) -> np.ndarray:
    return words[np.arange(words.shape[1]) < shown[:, None]]


def cut_at(words: np.ndarray, start: int, words_left: int | None, tokens_left: int | None) -> int:
    """Where the piece that begins at flat position `start` must end so that neither mark is passed.

    A cut at words comes right before the word that would be too many, so the last word is whole. A single token in
    which several words begin cannot be cut: it belongs to the piece that it completes.
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
    reached = int(np.searchsorted(np.cumsum(counts, dtype=np.int64), words_left))
    rest = counts[reached + 1 :] > 0
    return start + reached + 1 + int(rest.argmax()) if rest.any() else stop
