"""What every source has in common: options for reading, shards, fields of rows, and the registry of formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.config.ranges import Count, CountOrZero, Seed
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import decode

FORMATS = Registry("source format")
Separator = str | dict[str, str]
"""`blank` (lines), `lines`, `file` or any other text; or these by patterns of file names, of which the first counts."""
MAX_ROW_BYTES = 32_000_000
"""A row with fields is held in memory as a whole; a text file may have documents of any length."""
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


class Document(NamedTuple):
    """A document that is read piece by piece."""

    texts: Iterator[str]
    prompt: int
    """How many of its first characters are only read and never predicted."""


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read from a source; each format uses the options that concern it."""

    fields: tuple[str, ...] = ("text",)
    """JSONL, parquet, Hub: the fields that make a document; a dot goes into an object."""
    joiner: str = "\n"
    """The text between several fields."""
    answer: str | None = None
    """JSONL, parquet, Hub, `maths` and `arithmetic`: the field with the answer to what the other fields ask; then only
    answers are trained on, and the rest is read."""
    template: str = TEMPLATE
    """With an answer: the document, in which {question} stands for the joined fields; it ends with {answer}."""
    separator: Separator = "blank"
    """Text files: documents are separated by `blank` lines or any other text, are `lines`, or a whole `file`; or these
    by patterns of file names, of which the first counts: `{"childes*": lines, "*": blank}`."""
    section_bytes: Count | None = None
    """Text files: longer documents are cut into several of this size, each to the end of its line."""
    encoding: str = "utf-8"
    """Text files, JSONL: the encoding."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """What to do with bytes that are not text."""
    documents: Count = 10_000
    """Built-in corpora: how many documents."""
    first: CountOrZero = 0
    """Built-in corpora: the number of the first document, so that a second data set can begin where one ended."""
    seed: Seed = 0
    """Built-in corpora: the seed; each has an endless corpus of its own."""
    split: str = "train"
    """A Hub data set: which split."""
    subset: str | None = None
    """A Hub data set: which configuration, where it has several."""

    def __post_init__(self) -> None:
        # One field may be given as a text, several as any sequence.
        fields = (self.fields,) if isinstance(self.fields, str) else tuple(self.fields)
        object.__setattr__(self, "fields", fields)
        decode(ReadOptions, self)
        if self.template.count(QUESTION) != 1 or self.template.find(ANSWER) != len(self.template) - len(ANSWER):
            raise BraidError(
                f"a template has {QUESTION} once and ends with {ANSWER}, which is nowhere else in it: {self.template!r}"
            )

    def facts(self) -> dict[str, Any]:
        """The options as plain data; of answers and sections only where there are any: earlier versions had none."""
        unused = ["answer", "template"] if self.answer is None else []
        unused += ["section_bytes"] if self.section_bytes is None else []
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True)
class Shard:
    """A part of a source that can be read on its own: bytes of a file, row groups, or document numbers."""

    kind: str
    """The format's name."""
    source: str
    """A path, or the name of a corpus or Hub data set."""
    start: int = 0
    stop: int = -1
    """One past the end; -1 is the end of the source."""
    size: int = 0
    """About how many bytes there are to read, for progress and sampling."""


class Format(ABC):
    """One kind of source. A new one is a file in this folder with a class under `@FORMATS.register`."""

    extensions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Sources that are no files, by their names."""
    start_unit = "byte"
    """What `Shard.start` counts."""

    @classmethod
    def named(cls, source: str) -> str | None:
        """The source that a word on the command line names, if it is one of this format and no file."""
        return source if source in cls.names else None

    def has_fields(self, source: str) -> bool:
        """Whether documents are made from named fields, one of which may be an answer."""
        return False

    @abstractmethod
    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        """The shards of a source, in order, each of about `shard_bytes`."""

    @abstractmethod
    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        """The documents of one shard, in order."""

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        """The documents in pieces; a format whose documents may be longer than memory makes them here."""
        return (Piece(text, True) for text in self.documents(shard, options))

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        """Values that change when the text does; a run with the same fingerprint may continue the work of another."""
        status = Path(source).stat()
        return {"place": source, "size": status.st_size, "changed": status.st_mtime_ns}


class RowFormat(Format):
    """A format whose documents are rows with fields: it makes pieces, of which each is a document."""

    def has_fields(self, source: str) -> bool:
        return True

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        return (piece.text for piece in self.pieces(shard, options))

    @abstractmethod
    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        """The documents of one shard, in order, each in one piece; see `document_of`."""


def by_document(pieces: Iterable[Piece]) -> Iterator[Document]:
    """Each document, which has to be read before the next."""
    remaining = iter(pieces)
    return (Document(_until_end(piece, remaining), piece.prompt) for piece in remaining)


def _until_end(piece: Piece, remaining: Iterator[Piece]) -> Iterator[str]:
    yield piece.text
    while not piece.ends:
        piece = next(remaining)
        yield piece.text


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
    return BraidError(
        f"there are more than {MAX_BLANK >> 20} MB of white space in a row", where, "This is no text: leave it out."
    )


def row_too_long(where: str) -> BraidError:
    """The error for a row that would take too much memory."""
    return BraidError(
        f"this row has more than {MAX_ROW_BYTES // 1_000_000} MB",
        where,
        "Divide it into several, or put its text into a text file (`--separator file`), which may have any length.",
    )


def missing_package(package: str, purpose: str) -> BraidError:
    """The error for an optional package that is not installed."""
    return BraidError(f"{purpose} needs the package '{package}'", todo="pip install 'braidlm[data]'")


def document_of(row: Mapping[str, Any], options: ReadOptions, where: str) -> Piece:
    """The chosen fields of a row, joined; with an answer, as the template says. A null counts as nothing.

    A question without an answer, or an answer without a question, is an empty document.
    """
    parts = [_text_of(row, name, options, where) for name in options.fields]
    text = options.joiner.join(part for part in parts if part)
    if options.answer is None:
        return Piece(text, True)
    question, answer = text.strip(), _text_of(row, options.answer, options, where).strip()
    if not question or not answer:
        return Piece("", True)
    prompt = options.template.removesuffix(ANSWER).replace(QUESTION, question)
    return Piece(prompt + answer, True, len(prompt))


def check_columns(columns: list[str], options: ReadOptions, where: str) -> list[str]:
    """The top-level columns that the fields need, or an error that names those that exist."""
    needed = []
    for name in (*options.fields, *filter(None, [options.answer])):
        top = name if name in columns else name.split(".")[0]
        if top not in columns:
            raise _unknown(name, columns, where)
        needed.append(top)
    return list(dict.fromkeys(needed))


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name in row:  # a name with a dot in it comes before a path
        return row[name]
    value: Any = row
    for step in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or step not in value:
            raise _unknown(name, value if isinstance(value, Mapping) else (), where, step)
        value = value[step]
    return value


def _unknown(name: str, known: Any, where: str, step: str | None = None) -> BraidError:
    names = [str(item) for item in known]
    listed = f" It has: {', '.join(names)}." if names else ""
    hint = did_you_mean(step or name, names) if names else ""
    return BraidError(
        f"there is no field '{name}'.{hint if 'Did you' in hint else ''}{listed}",
        where,
        "Choose with `--field NAME` (several: `--field A --field B`; inside an object: `--field A.B`), an answer with "
        "`--answer NAME`.",
    )


def _text_of(row: Mapping[str, Any], name: str, options: ReadOptions, where: str) -> str:
    value = _field(row, name, where)
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.isascii() else _without_surrogates(value, options, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    inside = f" Its fields: {', '.join(map(str, value))}." if isinstance(value, Mapping) else ""
    kind = {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), type(value).__name__)
    raise BraidError(
        f"the field '{name}' holds {kind}, not text.{inside}", where, "Choose another with `--field NAME`."
    )


def _without_surrogates(text: str, options: ReadOptions, where: str) -> str:
    """Handle a lone surrogate, which JSON can contain (\\ud83d alone) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        if options.errors == "strict":
            raise BraidError(
                "a text holds half a character (a lone surrogate)", where, "`--errors replace` puts � in its place."
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", options.errors)
    return text
