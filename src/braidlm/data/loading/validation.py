"""Held-out text for bits per byte: whole documents, every token of them (or of their answers) predicted exactly once.

Where only answers are predicted, a row has whole documents, so that each question is before its answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED
from braidlm.data.loading.chunking import document_rows
from braidlm.data.loading.streams import TokenStream


@dataclass(frozen=True)
class ValidationSet:
    """Batches of rows over the first documents of a stream, with the counts of those documents."""

    stream: TokenStream
    length: int
    rows: int
    starts: np.ndarray
    """Where each row begins in the stream; it ends where the next begins."""
    end: int
    """Where the last row ends."""
    tokens: int
    """The number of labels: every token of the documents, or of their answers, EOS included."""
    words: int
    """Words of exactly those documents."""
    bytes: int
    """UTF-8 bytes of exactly those documents or answers: bits per byte is the summed loss / ln 2 / bytes."""

    def __len__(self) -> int:
        return -(-len(self.starts) // self.rows)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(inputs, labels), each [rows, T] int64; all of one shape, padded with the label -100."""
        lengths = np.diff(self.starts, append=self.end)
        eos = self.stream.data.manifest.eos_id
        for first in range(0, len(self.starts), self.rows):
            starts, used = self.starts[first : first + self.rows], lengths[first : first + self.rows]
            # Each row is read from the token before it, from which its first token is predicted.
            positions = self.stream.positions(starts - 1, self.length + 1)
            tokens = self.stream.tokens_at(positions)
            if not first:
                # The very first token has nothing before it but the EOS that ends every other document, or, where
                # documents have no end, the last token.
                tokens[0, 0] = self.stream.read(self.end - 1, 1)[0][0] if eos is None else eos
            is_padding = np.arange(self.length) >= used[:, None]
            inputs = np.where(is_padding, tokens[0, 0], tokens[:, :-1])
            ignored = is_padding | ~self.stream.targets_at(positions[:, 1:])
            labels = np.where(ignored, IGNORED, tokens[:, 1:])
            padding = ((0, self.rows - len(starts)), (0, 0))
            inputs = np.pad(inputs, padding, constant_values=tokens[0, 0])
            yield inputs, np.pad(labels, padding, constant_values=IGNORED)


def validation_windows(
    stream: TokenStream, length: int, max_tokens: int | None = None, rows: int = 16
) -> ValidationSet:
    """Rows of `length` over the first whole documents that fit into `max_tokens` (at least one document)."""
    end, words, size = stream.first_documents(max_tokens)
    if not end or not size:
        what = "there is nothing to validate on: the documents are empty"
        raise BraidError(what, f"data set '{stream.name}' ({stream.data.folder})", "Name a data set with text.")
    bounds, tokens = np.array([0, end]), end
    if stream.has_prompts:
        bounds = stream.document_bounds[: int(np.searchsorted(stream.document_bounds, end)) + 1]
        tokens = int(stream.targets_at(stream.positions(np.zeros(1, np.int64), end)).sum())
    starts = row_starts(bounds, length, stream.has_prompts)
    return ValidationSet(stream, length, rows, starts, end, tokens, words, size)


def row_starts(bounds: np.ndarray, length: int, has_prompts: bool) -> np.ndarray:
    """Where rows of `length` begin that predict every token of documents between `bounds` [documents + 1] once.

    A question is before its answer; where all is predicted, rows need not begin with a document.
    """
    return document_rows(bounds, length) if has_prompts else np.arange(0, bounds[-1], length)
