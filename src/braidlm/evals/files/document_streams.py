"""Documents to score, as a model's tokens: of text files, or of packed data sets."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.packed_data import MANIFEST, PackedData, is_packed
from braidlm.data.sources.plan import ReadOptions, plan_shards, read_documents
from braidlm.data.sources.separators import check_separator, parse_separators, unescaped
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.cutting import Cutter
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import Settings


class DocumentStream(ABC):
    """Documents one after another."""

    parts: list[str]
    """The file or data set of each document."""
    bytes: np.ndarray
    """[documents], of their text in UTF-8."""

    @abstractmethod
    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[list[int]]:
        """The tokens of each document, ended by `eos`."""


class TextDocuments(DocumentStream):
    """Documents as text."""

    def __init__(self, texts: Sequence[str], parts: list[str]):
        self.texts, self.parts = texts, parts
        self.bytes = np.array([len(text.encode()) for text in texts])

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[list[int]]:
        cutter = Cutter(tokenizer)
        return [[*cutter.encode(text), eos] for text in self.texts]


class PackedDocuments(DocumentStream):
    """Documents of a packed data set: its own tokens for models with its tokenizer, else their text."""

    def __init__(self, data: PackedData, held_out: float | None):
        self.data = data
        share = Subset() if held_out is None else Subset(1.0 - held_out, 1.0)
        self._chosen = share.choose(data.manifest.documents)
        if not len(self._chosen):
            raise BraidError(f"{held_out:g} of {data.manifest.documents} documents is none", str(data.folder))
        self.parts = [data.folder.name] * len(self._chosen)
        self.bytes = data.document_bytes[self._chosen].astype(np.int64)

    def encode(self, tokenizer: BraidTokenizer, eos: int) -> list[list[int]]:
        if self.data.manifest.tokenizer == tokenizer.fingerprint:
            return self._tokens
        return TextDocuments(self._texts, self.parts).encode(tokenizer, eos)

    @cached_property
    def _tokens(self) -> list[list[int]]:
        starts = self.data.document_starts
        documents = [self.data.tokens[starts[number] : starts[number + 1]] for number in self._chosen]
        for tokens in documents:
            self.data.check_tokens(tokens)
        return [tokens.tolist() for tokens in documents]

    @cached_property
    def _texts(self) -> list[str]:
        tokenizer = load_tokenizer(self.data.tokenizer_folder)
        eos = self.data.manifest.eos_id
        texts = [tokenizer.decode(ids[:-1] if ids[-1:] == [eos] else ids) for ids in self._tokens]
        if [len(text.encode()) for text in texts] != self.bytes.tolist():
            raise BraidError(
                "this data set was packed with another tokenizer than the model's, from whose tokens the text cannot "
                "be had back",
                str(self.data.folder),
                "Give the text itself, or pack it with `braid prepare SOURCE --tokenizer MODEL --out DIR`.",
            )
        return texts


def open_streams(path: Path, settings: Settings) -> tuple[list[DocumentStream], str]:
    """The streams of a file, a folder of files, a packed data set or a folder of packed ones; and a hash of them."""
    folders = [path] if is_packed(path) else sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    if folders:
        sets = [PackedData(folder) for folder in folders]
        digest = "".join(f"{folder.name} {sha256_of(folder / 'tokens.bin')}\n" for folder in folders)
        streams: list[DocumentStream] = [PackedDocuments(data, settings.held_out) for data in sets]
        return streams, hashlib.sha256(digest.encode()).hexdigest()
    if settings.held_out is not None:
        raise BraidError(
            "only packed data has a held-out part", str(path), "Pack it with `braid prepare`, or leave out --held-out."
        )
    return _text_stream(path, settings)


def _text_stream(path: Path, settings: Settings) -> tuple[list[DocumentStream], str]:
    reading = ReadOptions(
        fields=settings.field, joiner=unescaped(settings.joiner), separator=parse_separators(settings.separator)
    )
    check_separator(reading.separator)
    shards = plan_shards([path], reading).shards
    root = (path if path.is_dir() else path.parent).absolute()
    texts: list[str] = []
    parts: list[str] = []
    for shard in shards:
        documents = [text for text in read_documents(shard, reading) if text.strip()]
        texts += documents
        parts += [str(Path(shard.source).relative_to(root))] * len(documents)
    if not texts:
        raise BraidError("there is no text in it", str(path))
    files = dict.fromkeys(shard.source for shard in shards)
    digest = "".join(f"{Path(file).name} {sha256_of(file)}\n" for file in files)
    return [TextDocuments(texts, parts)], hashlib.sha256(digest.encode()).hexdigest()
