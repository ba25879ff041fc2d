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
from typing import TYPE_CHECKING, Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.runs import trained_length
from braidlm.data.loading.halves import BLOCK_BYTES, Half, documents_of_half
from braidlm.data.loading.sharded_streams import stream_of
from braidlm.data.loading.streams import Subset, whole_documents
from braidlm.data.loading.validation import row_starts
from braidlm.data.packing.packed_data import MANIFEST, PackedData, is_packed
from braidlm.data.packing.sharded import open_packed
from braidlm.data.sources.format import Piece, by_document
from braidlm.data.sources.plan import ReadOptions, plan_shards
from braidlm.data.sources.text import parse_separators, unescaped
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.encoding import Packer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, begin_id
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.statistics import INFLUENCE, ratio_error, ratio_influences

if TYPE_CHECKING:  # `braid list tasks` imports this, and needs no torch
    from braidlm.opening.opened_model import OpenedModel

READING = (
    *("field", "joiner", "answer", "template", "separator"),
    *("held_out", "half", "max_tokens", "max_bytes"),
)
"""The fields of `Settings` that say what is read of a text."""
DEFAULT_WINDOW = 1024
"""Tokens of a window for models without a maximum context."""

EncodedDocuments = list[tuple[list[int], int]]
"""The tokens of each document, and how many of the first are its prompt, which is read and not scored."""


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

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> EncodedDocuments:
        """The tokens of each document, ended by `eos`."""
        packer = Packer(tokenizer)
        encoded: EncodedDocuments = []
        for text, _, prompt_length in self.documents:
            tokens: list[int] = []
            prompt = 0
            for part in packer.cutter.parts([text]) if prompt_length else ():
                batch = packer.pack([part], [False], prompts=[min(prompt_length, len(part))])
                tokens += batch.tokens.tolist()
                prompt += int((batch.targets == 0).sum())
                prompt_length = max(prompt_length - len(part), 0)
            encoded.append(([*(tokens or packer.cutter.encode(text)), eos], prompt))
        return encoded


class PackedDocuments:
    """Documents of a packed data set: its own tokens for models with its tokenizer, else their text."""

    def __init__(self, data: PackedData, subset: Subset, half: Half | None):
        self.data = data
        self._chosen = stream_of(data, subset).chosen
        if half is not None:
            sizes = data.document_bytes[self._chosen].tolist()
            self._chosen = self._chosen[documents_of_half(sizes, half, data.address)]
        self.parts = [data.folder.name] * len(self._chosen)
        self.bytes = data.document_target_bytes[self._chosen].astype(np.int64)
        self.has_prompts = data.targets is not None

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> EncodedDocuments:
        if self.data.manifest.tokenizer == tokenizer.fingerprint:
            return self._tokens
        return TextDocuments(self._texts, self.parts).encode(tokenizer, eos)

    @cached_property
    def _tokens(self) -> EncodedDocuments:
        starts, targets = self.data.document_starts, self.data.targets
        documents: EncodedDocuments = []
        for number in self._chosen:
            place = slice(starts[number], starts[number + 1])
            tokens = self.data.tokens[place]
            self.data.check_tokens(tokens)
            documents.append((tokens.tolist(), 0 if targets is None else int(targets[place].argmax())))
        return documents

    @cached_property
    def _texts(self) -> list[Piece]:
        tokenizer = load_tokenizer(self.data.tokenizer_folder)
        eos = self.data.manifest.eos_id
        texts = [tokenizer.decode(ids[:-1] if ids[-1:] == [eos] else ids) for ids, _ in self._tokens]
        if self.has_prompts or [len(text.encode()) for text in texts] != self.bytes.tolist():
            what = "this data set was packed with another tokenizer than the model's, from whose tokens the text "
            todo = "Give the text itself (of questions the JSONL, with `--answer`), or pack it with "
            todo += "`braid prepare SOURCE --tokenizer MODEL --out DIR`."
            raise BraidError(f"{what}cannot be had back", str(self.data.folder), todo)
        return [Piece(text, True) for text in texts]


DocumentStream = TextDocuments | PackedDocuments


@dataclass
class HeldOutText:
    streams: Sequence[DocumentStream]
    sha256: str
    max_tokens: int | None = None
    max_bytes: int | None = None
    half: Half | None = None
    """Which half of the text the streams are."""

    @property
    def count(self) -> int:
        return sum(len(stream.parts) for stream in self.streams)

    def check_models(self, models: Sequence["OpenedModel"]) -> None:
        """Refuse to score each tokenizer's models on a stretch of the text of its own."""
        if self.max_tokens is not None and len({model.tokenizer.fingerprint for model in models}) > 1:
            what = f"{self.max_tokens:,} tokens are another stretch of the text for each tokenizer of these models"
            todo = "--max-bytes N (`max_bytes` of the settings) cuts the same text for all of them."
            raise BraidError(what, ", ".join(model.name for model in models), todo)

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Bits per byte over all documents, and of each file or data set."""
        window = _window(model)
        trees, scored, lengths, names = self._prepare(model.scorer, model.tokenizer, window)
        is_scored = np.concatenate(scored)
        sums = document_sums(model.scorer.score_trees(trees, advance).tokens * is_scored, [len(one) for one in scored])
        metric = "bits per byte" if self.half is None else f"bits per byte, {self.half} half"
        notes = {"tokens": int(is_scored.sum()), "bytes": int(lengths.sum()), "window": window}
        return bits_result(task, metric, sums, lengths, names, notes=notes)

    @cached_per_tokenizer
    def _prepare(
        self, scorer: Scorer, tokenizer: BraidTokenizer, window: int
    ) -> tuple[PrefixTrees, list[np.ndarray], np.ndarray, list[str]]:
        """A window per tree; for each document which tokens (EOS included) count, its bytes, its file or data set."""
        eos = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
        requests, sizes, scored, parts = [], [], [], []
        for stream in self.streams:
            documents = stream.encode(tokenizer, eos)
            bounds = np.cumsum([0, *(len(tokens) for tokens, _ in documents)])
            of_bytes = whole_documents(np.cumsum([0, *stream.bytes]), self.max_bytes)
            count = min(whole_documents(bounds, self.max_tokens), of_bytes)
            documents, bounds = documents[:count], bounds[: count + 1]
            scored += [np.arange(len(tokens)) >= prompt for tokens, prompt in documents]
            sizes.append(stream.bytes[:count])
            parts += stream.parts[:count]
            ids = [eos, *chain.from_iterable(tokens for tokens, _ in documents)]
            starts = row_starts(bounds, window, stream.has_prompts).tolist()
            requests += [Request(ids[at : end + 1]) for at, end in pairwise([*starts, int(bounds[-1])])]
        return PrefixTrees(requests, share=False), scored, np.concatenate(sizes), parts


def read_text(path: Path | str, settings: Settings | None = None, trained: bool = False) -> HeldOutText:
    """A file, the files of a folder, a packed data set or a folder of them, read as the settings say; where they hold a
    share out, that share, or what is `trained` on."""
    path, settings = Path(path), settings or Settings()
    folders = [path] if is_packed(path) else sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    streams: list[DocumentStream]
    if folders:
        packed = [open_packed(folder) for folder in folders]
        cut = 1.0 - (settings.held_out or 0.0)
        subset = Subset() if settings.held_out is None else Subset(0.0, cut) if trained else Subset(cut, 1.0)
        streams = [PackedDocuments(data, subset, settings.half) for data in packed]
        hashes = [(data.folder.name, data.sha256) for data in packed]
    elif settings.held_out is not None:
        todo = "Pack it with `braid prepare`, or leave out --held-out."
        raise BraidError("only packed data has a held-out part", str(path), todo)
    else:
        stream, files = _text_stream(path, settings)
        streams, hashes = [stream], [(file.name, sha256_of(file)) for file in files]
    digest = "".join(f"{name} {sha256}\n" for name, sha256 in hashes)
    sha256 = hashlib.sha256(digest.encode()).hexdigest()
    return HeldOutText(streams, sha256, settings.max_tokens, settings.max_bytes, settings.half)


def _text_stream(path: Path, settings: Settings) -> tuple[TextDocuments, list[Path]]:
    """The documents of a file or of the files of a folder, and these files."""
    reading = ReadOptions(
        fields=settings.field,
        joiner=unescaped(settings.joiner),
        answer=settings.answer,
        template=unescaped(settings.template),
        separator=parse_separators(settings.separator),
        section_bytes=None if settings.half is None else BLOCK_BYTES,
    )
    plan = plan_shards([path], reading)
    root = (path if path.is_dir() else path.parent).absolute()
    documents, parts = [], []
    for shard in plan.shards:
        for texts, prompt in by_document(shard.format.pieces(shard, reading)):
            if (text := "".join(texts)).strip():
                documents.append(Piece(text, True, prompt))
                parts.append(str(Path(shard.source).relative_to(root)))
    if not documents:
        raise BraidError("there is no text in it", str(path))
    if settings.half is not None:
        sizes = [len(document.text.encode()) for document in documents]
        chosen = documents_of_half(sizes, settings.half, str(path))
        documents, parts = [documents[at] for at in chosen], [parts[at] for at in chosen]
    return TextDocuments(documents, parts), [Path(file) for file in dict.fromkeys(s.source for s in plan.shards)]


def bits_result(
    task: str,
    metric: str,
    sums: np.ndarray,
    bytes: np.ndarray,
    names: Sequence[str],
    judged: slice = slice(None),
    **more: Any,
) -> TaskResult:
    """Bits per byte of the documents that are judged, and of each file, data set or split; `names` has those.

    `sums` has the log-probability of each document, `bytes` its length; `more` are further fields of the result.
    """
    own = {name: np.array(names) == name for name in dict.fromkeys(names)}
    parts = {
        name: Part(bits_per_byte(float(sums[mask].sum()), int(bytes[mask].sum())), int(mask.sum()))
        for name, mask in own.items()
    }
    score = bits_per_byte(float(sums[judged].sum()), int(bytes[judged].sum()))
    bits, lengths = -sums[judged] / math.log(2), bytes[judged]
    error, influences = ratio_error(bits, lengths, score), ratio_influences(bits, lengths)
    fields = {"higher_is_better": False, "parts": parts, "items": {INFLUENCE: influences}, **more}
    return TaskResult(task, metric, score, len(sums), error, **fields)


def window_of(scorer: Scorer) -> int:
    """The number of tokens that a model can read at once."""
    return scorer.context or DEFAULT_WINDOW


def document_sums(log_probabilities: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[documents] the log-probability of each, for all of their tokens one after another."""
    return np.add.reduceat(log_probabilities, np.cumsum([0, *lengths])[:-1])


def bits_per_byte(log_probabilities_sum: float, bytes: int) -> float:
    """Bits a model needs per byte of text: comparable across tokenizers, unlike perplexity."""
    if bytes <= 0:
        raise BraidError("bits per byte need a text of at least one byte", "evaluation data")
    return -log_probabilities_sum / math.log(2) / bytes


def _window(model: EvaluatedModel) -> int:
    """The length of a window: what the settings say, else what the model was trained on at once, else its context."""
    from braidlm.core.models.folders import load_lineage  # imports torch

    limit, asked, context = model.scorer.forward.max_length, model.settings.window, window_of(model.scorer)
    if asked is None:
        return min((model.folder and trained_length(load_lineage(model.folder))) or context, context)
    if limit is not None and asked > limit:
        raise BraidError(f"a window of {asked} tokens is longer than the model's context of {limit}")
    return asked
