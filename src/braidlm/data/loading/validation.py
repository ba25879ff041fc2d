"""Held-out text for bits per byte: whole documents, every token of them predicted exactly once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED
from braidlm.data.loading.streams import TokenStream


@dataclass(frozen=True)
class ValidationSet:
    """Batches of windows over the first documents of a stream, with the counts of those documents."""

    stream: TokenStream
    length: int
    rows: int
    tokens: int
    """The number of labels: every token of the documents, EOS included."""
    words: int
    """Words of exactly those documents."""
    bytes: int
    """UTF-8 bytes of exactly those documents: bits per byte is the summed loss / ln 2 / bytes."""

    def __len__(self) -> int:
        """Batches."""
        return -(-self.tokens // (self.length * self.rows))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(inputs, labels), each [rows, T] int64; all of one shape, the last padded with the label -100."""
        size = self.length * self.rows
        # The first token has nothing before it, so it is predicted from the EOS that ends every other document.
        eos = self.stream.data.manifest.eos_id
        previous = np.array([eos if eos is not None else self._read(self.tokens - 1, 1)[0]])
        for begin in range(0, self.tokens, size):
            tokens = self._read(begin, min(size, self.tokens - begin))
            inputs, labels = np.full(size, previous[0]), np.full(size, IGNORED)
            inputs[: len(tokens)] = np.concatenate([previous, tokens[:-1]])
            labels[: len(tokens)] = tokens
            previous = tokens[-1:]
            yield inputs.reshape(self.rows, -1), labels.reshape(self.rows, -1)

    def _read(self, begin: int, count: int) -> np.ndarray:
        return self.stream.read(begin, count)[0].astype(np.int64)


def validation_windows(
    stream: TokenStream, length: int, max_tokens: int | None = None, rows: int = 16
) -> ValidationSet:
    """Windows of `length` over the first whole documents that fit into `max_tokens` (at least one document)."""
    tokens, words, size = stream.first_documents(max_tokens)
    if not tokens or not size:
        raise BraidError(
            "there is nothing to validate on: the documents are empty",
            f"data set '{stream.name}' ({stream.data.folder})",
            "Name a data set with text.",
        )
    return ValidationSet(stream, length, rows, tokens, words, size)
