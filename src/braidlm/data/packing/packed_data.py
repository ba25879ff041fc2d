"""Packed token files: what `braid prepare` writes and the loader reads by memory map.

A packed data set is a folder:

    data.json        counts, the token type, the tokenizer's fingerprint and where the text came from
    tokens.bin       every document's tokens in order, each document ended by the tokenizer's EOS
    words.bin        uint8 per token: how many words begin in it, so that any slice has an exact word count
    documents.bin    int64 [documents + 1]: where each document's tokens begin
    lengths.bin      uint32 [documents, 2]: words and UTF-8 bytes of each document's text
    tokenizer/       the tokenizer that made the tokens

Where only some tokens are targets, which a model is trained to predict and scored on (answers, and not questions):

    targets.bin        uint8 per token: 1 for a target, 0 for a token that is only read
    target_bytes.bin   uint32 [documents]: UTF-8 bytes of each document's targets

A set in shards has data.json, tokenizer/ and a folder NNNNNN/ with the other files for each shard; see `sharded`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from braidlm.core.addresses import exists, is_address, read_json_at
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import sha256_of
from braidlm.core.reading import explained_system_errors, read_json
from braidlm.model.config.ranges import Count, CountOrZero, VocabularySize
from braidlm.model.config.strict import decode

FORMAT = 1
MANIFEST = "data.json"
CHECKED_TOKENS = 1 << 28
"""Ids that are looked at before anything is done with them, in a tenth of a second or so."""


@dataclass
class TargetCounts:
    """How much of a data set a model is trained to predict, where that is not all of it."""

    tokens: CountOrZero
    bytes: CountOrZero


@dataclass
class ShardFacts:
    """What data.json says of one shard of a data set."""

    name: str
    """The shard's folder in that of the data set."""
    tokens: Count
    documents: Count
    words: CountOrZero
    bytes: CountOrZero
    sha256: str
    """The hash of its files; see `shard_sha256`."""
    targets: TargetCounts | None = None


@dataclass
class Manifest:
    """The contents of data.json."""

    name: str
    tokens: CountOrZero
    documents: CountOrZero
    words: CountOrZero
    bytes: CountOrZero
    dtype: Literal["uint16", "uint32"]
    """uint16 when the vocabulary allows, else uint32."""
    vocab_size: VocabularySize
    eos_id: CountOrZero | None
    tokenizer: str
    """Fingerprint of the tokenizer."""
    source: dict[str, Any] = field(default_factory=dict)
    targets: TargetCounts | None = None
    """None where every token is a target."""
    shards: list[ShardFacts] | None = None
    """None where the files lie beside data.json."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.eos_id is not None and self.eos_id >= self.vocab_size:
            raise BraidError(f"eos_id is {self.eos_id} in a vocabulary of {self.vocab_size}")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class PackedData:
    """A packed data set on disk, read by memory map.

    What a damaged folder could hold is refused: files of a wrong size when it is opened, contents when they are first
    needed, since a large data set should open at once.
    """

    def __init__(self, folder: Path | str, manifest: Manifest | None = None):
        """The manifest of a shard comes from the set that it is of."""
        self.folder = Path(folder)
        self.address = str(folder)
        """Where it is, to be opened there again."""
        self.manifest = read_manifest(self.folder) if manifest is None else manifest
        for name, expected in file_sizes(self.manifest).items():
            with explained_system_errors(self.folder / name):
                size = (self.folder / name).stat().st_size
            if size != expected:
                raise self._damaged(f"{name} has {size} bytes where data.json promises {expected}")

    @cached_property
    def tokens(self) -> np.ndarray:
        tokens = self._map("tokens.bin", np.dtype(self.manifest.dtype))
        self.check_tokens(tokens[:CHECKED_TOKENS])
        return tokens

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Refuse ids that the vocabulary does not have; for who reads beyond the first tokens."""
        if (largest := int(tokens.max(initial=0))) >= self.manifest.vocab_size:
            raise self._damaged(f"tokens.bin holds the id {largest} of a vocabulary of {self.manifest.vocab_size}")

    @cached_property
    def sha256(self) -> str:
        """The hash of its tokens."""
        return sha256_of(self.folder / "tokens.bin")

    @cached_property
    def word_starts(self) -> np.ndarray:
        return self._map("words.bin", np.dtype(np.uint8))

    @cached_property
    def document_starts(self) -> np.ndarray:
        """[documents + 1] token positions."""
        starts = self._map("documents.bin", np.dtype(np.int64))
        if starts[0] != 0 or starts[-1] != self.manifest.tokens or (starts[1:] < starts[:-1]).any():
            raise self._damaged("documents.bin does not divide the tokens into documents")
        return starts

    @cached_property
    def document_words(self) -> np.ndarray:
        return self._lengths[:, 0]

    @cached_property
    def document_bytes(self) -> np.ndarray:
        return self._lengths[:, 1]

    @cached_property
    def targets(self) -> np.ndarray | None:
        """[tokens] uint8: 1 for those that are to be predicted; None where all are."""
        if self.manifest.targets is None:
            return None
        targets = self._map("targets.bin", np.dtype(np.uint8))
        if targets.max(initial=0) > 1 or int(targets.sum(dtype=np.int64)) != self.manifest.targets.tokens:
            raise self._damaged("targets.bin does not have the targets that data.json promises")
        return targets

    @cached_property
    def document_target_bytes(self) -> np.ndarray:
        """[documents]: the bytes that are to be predicted."""
        if self.manifest.targets is None:
            return self.document_bytes
        sizes = self._map("target_bytes.bin", np.dtype(np.uint32))
        if int(sizes.sum(dtype=np.int64)) != self.manifest.targets.bytes:
            raise self._damaged("the bytes in target_bytes.bin do not add up to those in data.json")
        return sizes

    @cached_property
    def _lengths(self) -> np.ndarray:
        lengths = self._map("lengths.bin", np.dtype(np.uint32)).reshape(-1, 2)
        if lengths.sum(axis=0, dtype=np.int64).tolist() != [self.manifest.words, self.manifest.bytes]:
            raise self._damaged("the words and bytes in lengths.bin do not add up to those in data.json")
        return lengths

    def opened(self) -> "PackedData":
        """This data set with all that it has mapped and checked now; its files may be removed from here on."""
        _ = self.tokens, self.word_starts, self.document_starts, self._lengths, self.targets, self.document_target_bytes
        return self

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.folder / name
        with explained_system_errors(path):
            if path.stat().st_size == 0:
                return np.zeros(0, dtype)
            # A plain array, because NumPy's memmap class makes every slice and gather slower.
            return np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    def _damaged(self, what: str) -> BraidError:
        return BraidError(what, str(self.folder), "The folder is damaged: run `braid prepare` again.")


def file_sizes(facts: Manifest) -> dict[str, int]:
    """The files of a data set, or of a shard, with their bytes."""
    sizes = {"tokens.bin": np.dtype(facts.dtype).itemsize * facts.tokens, "words.bin": facts.tokens}
    sizes |= {"documents.bin": 8 * (facts.documents + 1), "lengths.bin": 8 * facts.documents}
    if facts.targets is not None:
        sizes |= {"targets.bin": facts.tokens, "target_bytes.bin": 4 * facts.documents}
    return sizes


def is_packed(place: Path | str) -> bool:
    """Whether a folder or an address is a finished packed data set."""
    return exists(f"{place}/{MANIFEST}") if is_address(place) else (Path(place) / MANIFEST).is_file()


def read_manifest(place: Path | str) -> Manifest:
    """The manifest of the data set in a folder or at an address."""
    if not is_packed(place):
        if is_address(place):
            what = "there is no packed data set at this address (no data.json)"
            raise BraidError(what, str(place), "Make one with `braid prepare SOURCE --out ADDRESS`.")
        folder = Path(place)
        where = "" if folder.is_absolute() else f", seen from {Path.cwd()}"
        what = "this is not a packed data set (no data.json)" if folder.is_dir() else f"there is no such folder{where}"
        raise BraidError(what, str(folder), "Make a packed data set with `braid prepare SOURCE --out DIR`.")
    facts = read_json_at(f"{place}/{MANIFEST}") if is_address(place) else read_json(Path(place) / MANIFEST)
    if facts.get("format") != FORMAT:
        what = f"this data set has format {facts.get('format')}; this version of Braid reads format {FORMAT}"
        raise BraidError(what, str(place), "Run `braid prepare` again.")
    with errors_at(f"{place}/{MANIFEST}"):
        return decode(Manifest, facts)
