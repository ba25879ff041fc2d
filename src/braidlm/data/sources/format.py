"""What every source has in common: options for reading, shards, pieces of documents, and the registry of formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from braidlm.core.addresses import file_facts, is_address
from braidlm.core.errors import BraidError
from braidlm.core.reading import explained_system_errors
from braidlm.model.config.ranges import Count, CountOrZero, Seed
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import decode

FORMATS = Registry("source format")
Separator = str | dict[str, str]
"""`blank` (lines), `lines`, `file` or any other text; or these by patterns of file names, of which the first counts."""
MAX_BLANK = 1 << 26
"""White space of which nobody knows yet whether it is part of a text; more than this is refused, not held."""
QUESTION, ANSWER = "{question}", "{answer}"
TEMPLATE = f"Question: {QUESTION}\nAnswer: {ANSWER}"
"""A question with its answer as plain text."""


class Piece(NamedTuple):
    """A part of a document, short enough to hold in memory."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    prompt: int = 0
    """How many of the document's first characters are only read and never predicted; said with its first piece."""


@dataclass(frozen=True)
class Reading:
    """How documents are read from a source, as a recipe and a command say it; a format uses what concerns it."""

    documents: Count = 10_000
    """Built-in corpora: how many documents."""
    seed: Seed = 0
    """Built-in corpora: the seed; each has an endless corpus of its own."""
    fields: tuple[str, ...] = ("text",)
    """JSONL, CSV, parquet, Hub: the fields that make a document; a dot goes into an object."""
    joiner: str = "\n"
    """The text between several fields."""
    answer: str | None = None
    """JSONL, CSV, parquet, Hub, `maths` and `arithmetic`: the field with the answer to what `fields` ask. Then only
    answers are trained and validated on, and the rest is read; see also `data.chunking: documents`."""
    template: str = TEMPLATE
    """With an answer: the text of a document, in which {question} stands for the joined fields; it ends with {answer}.
    """
    separator: Separator = "blank"
    """Text files: documents are separated by `blank` lines or any other text, are `lines`, or a whole `file`; or these
    by patterns of file names, of which the first counts: `{"childes*": lines, "*": blank}`."""
    encoding: str = "utf-8"
    """Text files, JSONL, CSV: the encoding."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """What to do with bytes that are not text."""
    split: str = "train"
    """A Hub data set, and a corpus with splits: which split to read."""
    duplicates: Literal["keep", "exact", "near"] = "keep"
    """`exact` leaves out documents with the same words as an earlier one, `near` also those with nearly the same; in a
    recipe only training documents."""
    chunk_tokens: Count | None = None
    """Let chunks of so many tokens take the place of documents, so that text is held out by chunks (as in PaPaformer's
    own code) and not by documents."""
    quality: tuple[str, ...] = ()
    """Leave out documents (in a recipe only training documents) that break one of these rules: length, word_length,
    symbols, letters, stop_words, repetition, placeholders."""

    def __post_init__(self) -> None:
        # One may be given as a text, several as any sequence.
        for name in ("fields", "quality"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        decode(type(self), self)
        if self.template.count(QUESTION) != 1 or self.template.find(ANSWER) != len(self.template) - len(ANSWER):
            what = f"a template has {QUESTION} once and ends with {ANSWER}, which is nowhere else in it: "
            raise BraidError(what + repr(self.template))
        separators = [self.separator] if isinstance(self.separator, str) else list(self.separator.values())
        if not all(separators):
            raise BraidError("the separator is empty", todo="Choose blank, lines, file, or any text.")
        if self.chunk_tokens is not None and self.answer is not None:
            raise BraidError("chunks would cut answers off from their questions", "chunk_tokens", "Leave it out.")
        try:
            "".encode(self.encoding)  # refuses what is no encoding of text, such as base64
        except (LookupError, ValueError) as error:
            kind = "this encoding is not of text:" if "not a text encoding" in str(error) else "unknown encoding"
            raise BraidError(f"{kind} {self.encoding!r}", todo="For example utf-8, latin-1, utf-16.") from None
        for separator in separators:
            try:
                separator.encode(self.encoding)
            except UnicodeError:
                what = f"{self.encoding.upper()} text cannot hold the separator {separator!a}"
                raise BraidError(what, todo="Choose another separator, or name the files' encoding.") from None


@dataclass(frozen=True)
class ReadOptions(Reading):
    """How documents are read from one source, with what only a command or the code that reads says."""

    section_bytes: Count | None = None
    """Text files: longer documents are cut into several of this size, each to the end of its line."""
    first: CountOrZero = 0
    """Built-in corpora: the number of the first document, so that a second data set can begin where one ended."""
    subset: str | None = None
    """A Hub data set: which configuration, where it has several."""

    @property
    def filters(self) -> bool:
        """Whether some documents are left out."""
        return self.duplicates != "keep" or bool(self.quality)

    def facts(self) -> dict[str, Any]:
        """The options as plain data; of some options only those in use: earlier versions had none."""
        idle: dict[str, Any] = {"section_bytes": None, "chunk_tokens": None, "duplicates": "keep", "quality": ()}
        idle |= {"answer": None, "template": self.template} if self.answer is None else {}
        return {name: value for name, value in asdict(self).items() if name not in idle or value != idle[name]}


@dataclass(frozen=True)
class Shard:
    """A part of a source that can be read on its own: bytes of a file, row groups, or document numbers."""

    kind: str
    """The format's name."""
    source: str
    """A path or address, or the name of a corpus or Hub data set."""
    start: int = 0
    stop: int = -1
    """One past the end; -1 is the end of the source."""
    size: int = 0
    """About how many bytes there are to read, for progress and sampling."""

    @property
    def format(self) -> "Format":
        """What reads it: `shard.format.pieces(shard, options)`."""
        return FORMATS[self.kind]()  # type: ignore[no-any-return]

    @property
    def place(self) -> str:
        """Where it begins, for error messages about its documents."""
        return f"{self.source}, after {self.format.start_unit} {self.start}" if self.start else self.source


def consecutive_shards(kind: str, source: str, sizes: Sequence[int], shard_bytes: int) -> list[Shard]:
    """Shards of about `shard_bytes` or more, for the bytes of the files or row groups that a source is made of."""
    shards, start, total = [], 0, 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= shard_bytes or stop == len(sizes):
            shards.append(Shard(kind, source, start, stop, total))
            start, total = stop, 0
    return shards


class Format(ABC):
    """One kind of source. A new one is a file in this folder with a class under `@FORMATS.register`.

    A format has `documents`, or where these may be longer than memory or have prompts, `pieces`.
    """

    extensions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Sources that are no files, by their names."""
    start_unit = "byte"
    """What `Shard.start` counts."""
    read_beside_others = True
    """Whether a folder's files of this format are read where it has files of other formats too."""
    has_rows = False
    """Whether documents are rows with fields."""

    @classmethod
    def named(cls, source: str) -> str | None:
        """The source that a word on the command line names, if it is one of this format and no file."""
        return source if source in cls.names else None

    def has_fields(self, source: str) -> bool:
        """Whether documents are made from named fields, one of which may be an answer."""
        return self.has_rows

    @abstractmethod
    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        """The shards of a source, in order, each of about `shard_bytes`."""

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        """The documents of one shard, in order."""
        return ("".join(texts) for texts, _ in by_document(self.pieces(shard, options)))

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        """The documents in pieces that fit into memory."""
        return (Piece(text, True) for text in self.documents(shard, options))

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        """Values that change when the text does; a run with the same fingerprint may continue the work of another."""
        if is_address(source):
            size, mark = file_facts(source)
            return {"place": source, "size": size, "changed": mark}
        with explained_system_errors(source):
            status = Path(source).stat()
        return {"place": source, "size": status.st_size, "changed": status.st_mtime_ns}


def by_document(pieces: Iterable[Piece]) -> Iterator[tuple[Iterator[str], int]]:
    """Each document piece by piece, to be read before the next, and how many of its first characters are its prompt."""
    remaining = iter(pieces)

    def until_end(piece: Piece) -> Iterator[str]:
        yield piece.text
        while not piece.ends:
            piece = next(remaining)
            yield piece.text

    return ((until_end(piece), piece.prompt) for piece in remaining)


def from_first_word(document: Iterator[str], where: str) -> Iterator[str] | None:
    """A document's pieces, or None if it has no word."""
    blank = ""
    for text in document:
        blank += text
        if blank and not blank.isspace():
            return chain([blank], document)
        if len(blank) > MAX_BLANK:
            raise too_much_blank(where)
    return None


def too_much_blank(where: str) -> BraidError:
    """The error for white space that would take too much memory."""
    what = f"there are more than {MAX_BLANK >> 20} MB of white space in a row"
    return BraidError(what, where, "This is no text: leave it out.")


def missing_package(package: str, purpose: str) -> BraidError:
    """The error for an optional package that is not installed."""
    return BraidError(f"{purpose} needs the package '{package}'", todo="pip install 'braidlm[data]'")
