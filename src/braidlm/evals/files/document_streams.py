"""Documents to score, as a model's tokens: of text files, or of packed data sets."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.data.loading.halves import BLOCK_BYTES, Half, documents_of_half
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.packed_data import MANIFEST, PackedData, is_packed
from braidlm.data.packing.shards import Packer
from braidlm.data.sources.format import Piece, by_document
from braidlm.data.sources.plan import ReadOptions, check_answers, plan_shards, read_pieces
from braidlm.data.sources.text import check_separator, parse_separators, unescaped
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import Settings


class EncodedDocument(NamedTuple):
    """The tokens of a document."""

    tokens: list[int]
    prompt: int
    """How many of the first are read and not scored."""


class DocumentStream(ABC):
    """Documents one after another."""

    parts: list[str]
    """The file or data set of each document."""
    bytes: np.ndarray
    """[documents], of what is scored of their text in UTF-8."""

    has_prompts: bool
    """Whether documents begin with a prompt, which is read and not scored."""

    @abstractmethod
    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[EncodedDocument]:
        """The tokens of each document, ended by `eos`."""


class TextDocuments(DocumentStream):
    """Documents as text, each in one piece."""

    def __init__(self, documents: Sequence[Piece], parts: list[str]):
        self.documents, self.parts = documents, parts
        self.bytes = np.array([len(text[prompt:].encode()) for text, _, prompt in documents])
        self.has_prompts = any(document.prompt for document in documents)

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[EncodedDocument]:
        packer = Packer(tokenizer)
        return [_encoded(document, packer, eos) for document in self.documents]


class PackedDocuments(DocumentStream):
    """Documents of a packed data set: its own tokens for models with its tokenizer, else their text."""

    def __init__(self, data: PackedData, held_out: float | None, half: Half | None = None):
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
    check_separator(reading.separator)
    plan = plan_shards([path], reading)
    check_answers(plan, reading)
    root = (path if path.is_dir() else path.parent).absolute()
    documents: list[Piece] = []
    parts: list[str] = []
    for shard in plan.shards:
        before = len(documents)
        for texts, prompt in by_document(read_pieces(shard, reading)):
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
