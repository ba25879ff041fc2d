"""Bits per byte of held-out text: every token of every document is predicted exactly once, in windows.

As the validation of a run does it, so that the two agree on the same text: the documents of a source are one stream,
each ended by the EOS token, which is predicted too; the first token is predicted from an EOS token; a window has as
many tokens as the run's training sequences. Of questions with answers only answers are scored, in windows of whole
documents. A packed data set is a stream of its own; the files of a folder are one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.models.trained_length import trained_length
from braidlm.data.loading.chunking import document_rows
from braidlm.data.loading.halves import Half
from braidlm.data.tokenizing.cutting import Cutter
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.files.document_streams import DocumentStream, EncodedDocument, open_streams
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, begin_id
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics.influence import INFLUENCE, ratio_influences
from braidlm.evals.statistics.standard_errors import ratio_error

DEFAULT_WINDOW = 1024
"""For models without a maximum context."""


@dataclass(frozen=True)
class _Encoded:
    """What is read for one tokenizer: a window per tree, and the documents that were taken."""

    trees: PrefixTrees
    tokens: np.ndarray
    """[documents], EOS included."""
    scored: np.ndarray
    """[tokens of all documents] bool: all but those of prompts."""
    bytes: np.ndarray
    """[documents]"""
    parts: list[str]
    """The file or data set of each document."""


@dataclass
class HeldOutText:
    """Some streams of documents."""

    streams: Sequence[DocumentStream]
    sha256: str
    max_tokens: int | None = None
    half: Half | None = None
    """Which half of the text the streams are."""

    @property
    def count(self) -> int:
        return sum(len(stream.parts) for stream in self.streams)

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Bits per byte over all documents, and of each file or data set."""
        window = _window(model)
        encoded = self._prepare(model.scorer, model.tokenizer, window)
        log_probabilities = model.scorer.score_trees(encoded.trees, advance).tokens * encoded.scored
        sums = np.add.reduceat(log_probabilities, np.concatenate(([0], np.cumsum(encoded.tokens)[:-1])))
        lengths = encoded.bytes
        names = np.array(encoded.parts)
        parts = {
            name: Part(
                bits_per_byte(float(sums[names == name].sum()), int(lengths[names == name].sum())),
                int((names == name).sum()),
            )
            for name in dict.fromkeys(encoded.parts)
        }
        score = bits_per_byte(float(sums.sum()), int(lengths.sum()))
        return TaskResult(
            task=task,
            metric="bits per byte" if self.half is None else f"bits per byte, {self.half} half",
            score=score,
            count=len(lengths),
            standard_error=ratio_error(-sums / math.log(2), lengths, score),
            higher_is_better=False,
            parts=parts,
            notes={"tokens": int(encoded.scored.sum()), "bytes": int(lengths.sum()), "window": window},
            items={INFLUENCE: ratio_influences(-sums / math.log(2), lengths)},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, window: int) -> _Encoded:
        eos = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
        requests: list[Request] = []
        tokens: list[int] = []
        sizes: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        parts: list[str] = []
        for stream in self.streams:
            documents = _first_documents(stream.encode(tokenizer, eos), self.max_tokens)
            lengths = [len(document.tokens) for document in documents]
            tokens += lengths
            scored += [np.arange(len(document.tokens)) >= document.prompt for document in documents]
            sizes.append(stream.bytes[: len(documents)])
            parts += stream.parts[: len(documents)]
            ids = [eos, *(token for document in documents for token in document.tokens)]
            bounds = np.cumsum([0, *lengths])
            # A question is before its answer; where all is scored, windows need not begin with a document.
            starts = document_rows(bounds, window) if stream.has_prompts else np.arange(0, bounds[-1], window)
            requests += [Request(ids[at : end + 1]) for at, end in pairwise([*starts.tolist(), int(bounds[-1])])]
        trees = PrefixTrees(requests, share=False)
        return _Encoded(trees, np.array(tokens), np.concatenate(scored), np.concatenate(sizes), parts)


def read_text(path: Path | str, settings: Settings | None = None) -> HeldOutText:
    """A file, the files of a folder, a packed data set or a folder of them, read as the settings say."""
    settings = settings or Settings()
    streams, sha256 = open_streams(Path(path), settings)
    return HeldOutText(streams, sha256, settings.max_tokens, settings.half)


def window_of(scorer: Scorer) -> int:
    """The number of tokens that a model can read at once."""
    return scorer.context or DEFAULT_WINDOW


def encode_long(tokenizer: BraidTokenizer, text: str) -> list[int]:
    """The tokens of a text of any length."""
    return Cutter(tokenizer).encode(text)


def bits_per_byte(log_probabilities_sum: float, bytes: int) -> float:
    """Bits a model needs per byte of text: comparable across tokenizers, unlike perplexity."""
    if bytes <= 0:
        raise BraidError("bits per byte need a text of at least one byte", "evaluation data")
    return -log_probabilities_sum / math.log(2) / bytes


def _window(model: EvaluatedModel) -> int:
    """The tokens of a window: those asked for, else those that the model was trained on at once, else its context."""
    limit, asked = model.scorer.forward.max_length, model.settings.window
    if asked is None:
        return min(_trained_length(model.folder) or window_of(model.scorer), window_of(model.scorer))
    if limit is not None and asked > limit:
        raise BraidError(f"a window of {asked} tokens is longer than the model's context of {limit}")
    return asked


def _trained_length(folder: Path | None) -> int | None:
    from braidlm.core.models.folders import load_lineage

    return None if folder is None else trained_length(load_lineage(folder))


def _first_documents(documents: Sequence[EncodedDocument], max_tokens: int | None) -> Sequence[EncodedDocument]:
    """The first whole documents within so many tokens, at least one."""
    if max_tokens is None:
        return documents
    ends = np.cumsum([len(document.tokens) for document in documents])
    return documents[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]
