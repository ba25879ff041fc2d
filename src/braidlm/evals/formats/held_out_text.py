"""Bits per byte of held-out text: every token of every document is predicted exactly once, in windows.

Windows are those of a run's validation: the documents of a source are one stream, each ended by the EOS token, which is
predicted too; the first token is predicted from an EOS token; a window has as many tokens as the run's training
sequences. Of questions with answers only answers are scored, in windows of whole documents. A packed data set is
a stream of its own; the files of a folder are one.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.runs import trained_length
from braidlm.data.loading.halves import BLOCK_BYTES, Half, documents_of_half
from braidlm.data.loading.streams import Subset, whole_documents
from braidlm.data.loading.validation import row_starts
from braidlm.data.packing.packed_data import MANIFEST, PackedData, is_packed
from braidlm.data.packing.shards import Packer
from braidlm.data.sources.format import Piece, by_document
from braidlm.data.sources.plan import ReadOptions, check_answers, plan_shards
from braidlm.data.sources.text import parse_separators, unescaped
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, begin_id
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics import INFLUENCE, ratio_error, ratio_influences

DEFAULT_WINDOW = 1024
"""Tokens of a window for models without a maximum context."""


class EncodedDocument(NamedTuple):
    """The tokens of a document."""

    tokens: list[int]
    prompt: int
    """How many of the first are read and not scored."""


class TextDocuments:
    """Documents as text, each in one piece."""

    def __init__(self, documents: Sequence[Piece], parts: list[str]):
        self.documents = documents
        self.parts = parts
        """The file or data set of each document."""
        self.bytes = np.array([len(text[prompt:].encode()) for text, _, prompt in documents])
        """[documents], of what is scored of their text in UTF-8."""
        self.has_prompts = any(document.prompt for document in documents)
        """Whether documents begin with a prompt, which is read and not scored."""

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[EncodedDocument]:
        """The tokens of each document, ended by `eos`."""
        packer = Packer(tokenizer)
        return [_encoded(document, packer, eos) for document in self.documents]


class PackedDocuments:
    """Documents of a packed data set: its own tokens for models with its tokenizer, else their text."""

    def __init__(self, data: PackedData, held_out: float | None, half: Half | None):
        self.data = data
        share = Subset() if held_out is None else Subset(1.0 - held_out, 1.0)
        self._chosen = share.choose(data.manifest.documents)
        if not len(self._chosen):
            raise BraidError(f"{held_out:g} of {data.manifest.documents} documents is none", str(data.folder))
        if half is not None:
            sizes = np.asarray(data.document_bytes)[self._chosen].tolist()
            self._chosen = self._chosen[documents_of_half(sizes, half, str(data.folder))]
        self.parts = [data.folder.name] * len(self._chosen)
        self.bytes = data.document_target_bytes[self._chosen].astype(np.int64)
        self.has_prompts = data.targets is not None

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[EncodedDocument]:
        if self.data.manifest.tokenizer == tokenizer.fingerprint:
            return self._tokens
        return TextDocuments(self._texts, self.parts).encode(tokenizer, eos)

    @cached_property
    def _tokens(self) -> list[EncodedDocument]:
        starts, targets = self.data.document_starts, self.data.targets
        documents = []
        for number in self._chosen:
            place = slice(starts[number], starts[number + 1])
            tokens = self.data.tokens[place]
            self.data.check_tokens(tokens)
            documents.append(EncodedDocument(tokens.tolist(), 0 if targets is None else int(targets[place].argmax())))
        return documents

    @cached_property
    def _texts(self) -> list[Piece]:
        tokenizer = load_tokenizer(self.data.tokenizer_folder)
        eos = self.data.manifest.eos_id
        texts = [tokenizer.decode(ids[:-1] if ids[-1:] == [eos] else ids) for ids, _ in self._tokens]
        if self.has_prompts or [len(text.encode()) for text in texts] != self.bytes.tolist():
            raise BraidError(
                "this data set was packed with another tokenizer than the model's, from whose tokens the text cannot "
                "be had back",
                str(self.data.folder),
                "Give the text itself (of questions the JSONL, with `--answer`), or pack it with "
                "`braid prepare SOURCE --tokenizer MODEL --out DIR`.",
            )
        return [Piece(text, True) for text in texts]


DocumentStream = TextDocuments | PackedDocuments


def _encoded(document: Piece, packer: Packer, eos: int) -> EncodedDocument:
    """The tokens of a document, of which those of the prompt are counted."""
    if not document.prompt:
        return EncodedDocument([*packer.cutter.encode(document.text), eos], 0)
    tokens: list[int] = []
    prompt, left = 0, document.prompt
    for part in packer.cutter.parts([document.text]):
        batch = packer.pack([part], [False], prompts=[min(left, len(part))])
        tokens += batch.tokens.tolist()
        prompt += int((batch.targets == 0).sum())
        left = max(left - len(part), 0)
    return EncodedDocument([*tokens, eos], prompt)


def open_streams(path: Path, settings: Settings) -> tuple[list[DocumentStream], str]:
    """The streams of a file, a folder of files, a packed data set or a folder of packed ones; and a hash of them."""
    folders = [path] if is_packed(path) else sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    if folders:
        sets = [PackedData(folder) for folder in folders]
        digest = "".join(f"{folder.name} {sha256_of(folder / 'tokens.bin')}\n" for folder in folders)
        streams: list[DocumentStream] = [PackedDocuments(data, settings.held_out, settings.half) for data in sets]
        return streams, hashlib.sha256(digest.encode()).hexdigest()
    if settings.held_out is not None:
        raise BraidError(
            "only packed data has a held-out part", str(path), "Pack it with `braid prepare`, or leave out --held-out."
        )
    return _text_stream(path, settings)


def _text_stream(path: Path, settings: Settings) -> tuple[list[DocumentStream], str]:
    reading = ReadOptions(
        fields=settings.field,
        joiner=unescaped(settings.joiner),
        answer=settings.answer,
        template=unescaped(settings.template),
        separator=parse_separators(settings.separator),
        section_bytes=None if settings.half is None else BLOCK_BYTES,
    )
    plan = plan_shards([path], reading)
    check_answers(plan, reading)
    root = (path if path.is_dir() else path.parent).absolute()
    documents: list[Piece] = []
    parts: list[str] = []
    for shard in plan.shards:
        before = len(documents)
        for texts, prompt in by_document(shard.format.pieces(shard, reading)):
            if (text := "".join(texts)).strip():
                documents.append(Piece(text, True, prompt))
        parts += [str(Path(shard.source).relative_to(root))] * (len(documents) - before)
    if not documents:
        raise BraidError("there is no text in it", str(path))
    if settings.half is not None:
        sizes = [len(document.text.encode()) for document in documents]
        chosen = documents_of_half(sizes, settings.half, str(path))
        documents, parts = [documents[at] for at in chosen], [parts[at] for at in chosen]
    files = dict.fromkeys(shard.source for shard in plan.shards)
    digest = "".join(f"{Path(file).name} {sha256_of(file)}\n" for file in files)
    return [TextDocuments(documents, parts)], hashlib.sha256(digest.encode()).hexdigest()


class _Encoded(NamedTuple):
    """What is read for one tokenizer: a window per tree, and the documents that were taken."""

    trees: PrefixTrees
    scored: list[np.ndarray]
    """For each document [tokens, EOS included] bool: all but those of its prompt."""
    bytes: np.ndarray
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
        trees, scored, lengths, names = self._prepare(model.scorer, model.tokenizer, window)
        is_scored = np.concatenate(scored)
        sums = document_sums(model.scorer.score_trees(trees, advance).tokens * is_scored, [len(one) for one in scored])
        score = bits_per_byte(float(sums.sum()), int(lengths.sum()))
        return TaskResult(
            task=task,
            metric="bits per byte" if self.half is None else f"bits per byte, {self.half} half",
            score=score,
            count=len(lengths),
            standard_error=ratio_error(-sums / math.log(2), lengths, score),
            higher_is_better=False,
            parts=parts_of(sums, lengths, names),
            notes={"tokens": int(is_scored.sum()), "bytes": int(lengths.sum()), "window": window},
            items={INFLUENCE: ratio_influences(-sums / math.log(2), lengths)},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, window: int) -> _Encoded:
        eos = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
        requests: list[Request] = []
        sizes: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        parts: list[str] = []
        for stream in self.streams:
            documents = stream.encode(tokenizer, eos)
            bounds = np.cumsum([0, *(len(document.tokens) for document in documents)])
            count = whole_documents(bounds, self.max_tokens)
            documents, bounds = documents[:count], bounds[: count + 1]
            scored += [np.arange(len(document.tokens)) >= document.prompt for document in documents]
            sizes.append(stream.bytes[:count])
            parts += stream.parts[:count]
            ids = [eos, *chain.from_iterable(document.tokens for document in documents)]
            starts = row_starts(bounds, window, stream.has_prompts).tolist()
            requests += [Request(ids[at : end + 1]) for at, end in pairwise([*starts, int(bounds[-1])])]
        return _Encoded(PrefixTrees(requests, share=False), scored, np.concatenate(sizes), parts)


def read_text(path: Path | str, settings: Settings | None = None) -> HeldOutText:
    """A file, the files of a folder, a packed data set or a folder of them, read as the settings say."""
    settings = settings or Settings()
    streams, sha256 = open_streams(Path(path), settings)
    return HeldOutText(streams, sha256, settings.max_tokens, settings.half)


def window_of(scorer: Scorer) -> int:
    """The number of tokens that a model can read at once."""
    return scorer.context or DEFAULT_WINDOW


def document_sums(log_probabilities: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[documents] the log-probability of each, for all of their tokens one after another."""
    return np.add.reduceat(log_probabilities, np.cumsum([0, *lengths])[:-1])


def parts_of(sums: np.ndarray, bytes: np.ndarray, names: Sequence[str]) -> dict[str, Part]:
    """Bits per byte of each file, data set or split; `names` has that of each document."""
    of = {name: np.array(names) == name for name in dict.fromkeys(names)}
    return {
        name: Part(bits_per_byte(float(sums[own].sum()), int(bytes[own].sum())), int(own.sum()))
        for name, own in of.items()
    }


def bits_per_byte(log_probabilities_sum: float, bytes: int) -> float:
    """Bits a model needs per byte of text: comparable across tokenizers, unlike perplexity."""
    if bytes <= 0:
        raise BraidError("bits per byte need a text of at least one byte", "evaluation data")
    return -log_probabilities_sum / math.log(2) / bytes


def _window(model: EvaluatedModel) -> int:
    """The tokens of a window: those asked for, else those that the model was trained on at once, else its context."""
    from braidlm.core.models.folders import load_lineage  # imports torch

    limit, asked, context = model.scorer.forward.max_length, model.settings.window, window_of(model.scorer)
    if asked is None:
        return min((model.folder and trained_length(load_lineage(model.folder))) or context, context)
    if limit is not None and asked > limit:
        raise BraidError(f"a window of {asked} tokens is longer than the model's context of {limit}")
    return asked
