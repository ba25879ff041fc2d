"""In which order documents are read: shuffled, or by a score of each, from the lowest to the highest (a curriculum).

A pacing says how the training goes through that order: part by part, or from a pool that grows. It depends only on
progress and on the part before, so that a run that is resumed reads what it would have read.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from braidlm.core.console import say
from braidlm.core.errors import BraidError, check_folder_name
from braidlm.core.files import json_sha256, write_json, write_text
from braidlm.core.reading import read_json, read_text
from braidlm.data.loading.streams import Pacing, TokenStream, random_permutation
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.sources.plan import FORMATS, ReadOptions, plan_shards
from braidlm.model.config.ranges import Probability, Range
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf, decode, encode

orders, pacings = Registry("order"), Registry("pacing")
_TOKENS_PER_BLOCK = 1 << 22
"""How many tokens are scored at a time."""
FOLDER, RECORD, COLUMNS = "order", "order.json", ("document", "score", "tokens", "part")
"""The record in a run's folder: order.json has kind, options, seed and hash of each data set's order, and NAME.tsv its
documents, first to last. A run that goes on reads the record, so that it has the same order on any machine."""
Parts = Annotated[int, Range(at_least=1, at_most=1000)]


@pacings.register("sorted")
class SortedPacing(Pacing):
    """Each epoch reads the buckets one after another, from the first documents to the last; within one it shuffles."""

    @dataclass
    class Config:
        buckets: Parts = 10
        """How many parts of equal size: 1 shuffles everything, many come near to the exact order."""

    def parts(self) -> list[tuple[float, float]]:
        count = self.config.buckets
        return [(bucket / count, (bucket + 1) / count) for bucket in range(count)]

    def part_after(self, part: int) -> int:
        return (part + 1) % int(self.config.buckets)


class GrowingPool(Pacing):
    """The pool has the first documents; it never shrinks, also where a larger budget sets the progress back."""

    @dataclass
    class Config:
        start: Probability = 0.2
        """The share of the text in the pool at the beginning."""
        full: Probability = 0.5
        """The progress of the training at which all of the text is in the pool."""
        levels: Parts = 10
        """How many steps the pool grows in; each begins a new epoch of the larger pool."""

    def parts(self) -> list[tuple[float, float]]:
        start, levels = self.config.start, self.config.levels
        return [(0.0, start + (1 - start) * level / levels) for level in range(levels + 1)]

    def part_at(self, part: int, progress: float) -> int:
        """The level that is due; levels are of equal size, and the share of the pool says how many were reached."""
        start, levels = self.config.start, self.config.levels
        grown = min(progress / self.config.full, 1.0)
        due = (self.share(grown) - start) / (1 - start) if start < 1 else 1.0
        # Rounding must not hide a level that is reached exactly.
        return max(part, min(int(due * levels + 1e-9), levels))

    def share(self, grown: float) -> float:
        """The share of the text in the pool, from `start` at 0 to everything at 1."""
        raise NotImplementedError("abstract: each pool has its own curve")


@pacings.register("linear")
class LinearPool(GrowingPool):
    """Batches are drawn from a pool of the first documents, which grows evenly."""

    def share(self, grown: float) -> float:
        return float(self.config.start + (1 - self.config.start) * grown)


@pacings.register("root")
class RootPool(GrowingPool):
    """As `linear`, but quick at first: the square of the pool's share grows evenly (Platanios et al., 2019)."""

    def share(self, grown: float) -> float:
        return math.sqrt(self.config.start**2 + (1 - self.config.start**2) * grown)


@dataclass
class ByScore:
    """Options of orders by a score."""

    descending: bool = False
    """From the highest score to the lowest instead."""
    pacing: Annotated[Choice, PartOf(pacings, "sorted")] = "sorted"  # type: ignore[assignment]
    """How the training goes through the order."""


class Order:
    """The contract: a score for each document of a stream; equal ones are in a random order, which the seed fixes."""

    Config: Any = ByScore

    def __init__(self, config: Any):
        self.config = config

    def scores(self, stream: TokenStream) -> np.ndarray:
        """[documents of the stream] float64, in the order of the file."""
        raise NotImplementedError("abstract: each order has its own score")


@orders.register("shuffled")
class Shuffled(Order):
    """Chunks in a random order, another one every epoch."""

    @dataclass
    class Config:
        """No options."""


@orders.register("length")
class ByLength(Order):
    """By the number of a document's tokens."""

    def scores(self, stream: TokenStream) -> np.ndarray:
        starts = np.asarray(stream.data.document_starts)
        return (starts[stream.chosen + 1] - starts[stream.chosen]).astype(np.float64)


@orders.register("surprisal")
class BySurprisal(Order):
    """By the mean surprisal of a document's tokens in bits, given only how frequent each is: rare words are hard."""

    def scores(self, stream: TokenStream) -> np.ndarray:
        data = stream.data
        is_chosen = np.zeros(data.manifest.documents, bool)
        is_chosen[stream.chosen] = True
        counts = np.zeros(data.manifest.vocab_size, np.int64)
        for first, lengths, tokens in _blocks(data):
            of_chosen = np.repeat(is_chosen[first : first + len(lengths)], lengths)
            counts += np.bincount(tokens[of_chosen], minlength=len(counts))
        surprisal = -np.log2(np.maximum(counts, 1) / max(counts.sum(), 1))
        means = np.zeros(data.manifest.documents)
        for first, lengths, tokens in _blocks(data):
            document = np.repeat(np.arange(len(lengths)), lengths)
            # A bincount adds in order, so that every machine rounds alike.
            total = np.bincount(document, surprisal[tokens], minlength=len(lengths))
            means[first : first + len(lengths)] = total / np.maximum(lengths, 1)
        return means[stream.chosen]


@orders.register("field")
class ByField(Order):
    """By a number that each document brings in a field of its own, in JSONL, parquet or a Hub data set."""

    @dataclass
    class Config(ByScore):
        name: str = "difficulty"
        """The field; a dot goes into an object."""

    def scores(self, stream: TokenStream) -> np.ndarray:
        """The field of every document, read from the source that the data set was prepared from."""
        data, name = stream.data, self.config.name
        origin, where = data.manifest.source, f"data set '{stream.name}'"
        if "sources" not in origin or "reading" not in origin:
            raise BraidError("data.json does not say what it was prepared from", str(data.folder))
        options: ReadOptions = decode(ReadOptions, origin["reading"])
        numbers: list[float] = []
        for shard in plan_shards(origin["sources"], options).shards:
            if not shard.format.has_rows:
                with_fields = [kind for kind in FORMATS if FORMATS[kind].has_rows]
                what = f"documents of this source have no fields, and the order is by the field '{name}'"
                todo = f"Give it as one of {', '.join(with_fields)}, or choose another data.order."
                raise BraidError(what, f"{where} ({shard.source})", todo)
            fields = shard.format.documents(shard, replace(options, fields=(name,), answer=None))
            for text, number in zip(shard.format.documents(shard, options), fields, strict=True):
                if text.strip():  # the others were not packed
                    numbers.append(_number(number, name, shard.source, len(numbers)))
        if len(numbers) != data.manifest.documents:
            what = f"the source has {len(numbers):,} documents now, and {data.manifest.documents:,} were packed"
            raise BraidError(what, where, "Prepare it again, all of it.")
        return np.array(numbers)[stream.chosen]


def _number(text: str, name: str, source: str, before: int) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise BraidError(f"the field '{name}' is not a number but '{text[:40]}'", f"{source}, document {before + 1}")


def _blocks(data: PackedData) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The whole data set in blocks of documents: the first document, their lengths, and their tokens."""
    starts = np.asarray(data.document_starts)
    first = 0
    while first < data.manifest.documents:
        stop = int(np.searchsorted(starts, starts[first] + _TOKENS_PER_BLOCK, side="right")) - 1
        stop = min(max(stop, first + 1), data.manifest.documents)
        tokens = np.asarray(data.tokens[starts[first] : starts[stop]])
        data.check_tokens(tokens)
        yield first, np.diff(starts[first : stop + 1]), tokens
        first = stop


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of one data set, first to last."""

    documents: np.ndarray
    """The numbers of the documents in the data set."""
    scores: np.ndarray

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest()


class OrderedStream(TokenStream):
    """A stream that is read by parts of an order, each of which is a stream of its own."""

    def __init__(self, stream: TokenStream, choice: Choice, seed: int, order: DocumentOrder):
        super().__init__(stream.data, stream.subset, stream.name)
        self.choice, self.seed, self.order = choice, seed, order
        self.pacing = pacings.build(choice.options.pacing)
        starts = np.asarray(self.data.document_starts)
        self.lengths = starts[order.documents + 1] - starts[order.documents]
        ends = np.cumsum(self.lengths)
        shares = np.array(self.pacing.parts()) * ends[-1]
        # A part ends with the document that completes its share of the tokens.
        self.bounds = np.where(shares > 0, np.searchsorted(ends, shares - 0.5) + 1, 0)
        if (self.bounds[:, 0] >= self.bounds[:, 1]).any():
            what = f"its {self.documents:,} documents cannot be divided into {len(self.bounds)} parts of equal size"
            raise BraidError(what, f"data set '{self.name}'", "Divide them into fewer parts (`data.order.pacing`).")
        self._parts = [self.of_documents(order.documents[begin:end]) for begin, end in self.bounds]

    @property
    def parts(self) -> int:
        return len(self._parts)

    @property
    def shortest_part(self) -> int:
        return min(map(len, self._parts))

    def part(self, number: int, seed: int) -> TokenStream:
        return self._parts[number]

    def fingerprint(self) -> dict[str, Any]:
        """A saved position is one in this order."""
        order = {**encode(self.choice), "seed": self.seed, "sha256": self.order.sha256}
        return super().fingerprint() | {"order": order}

    def record(self) -> dict[str, Any]:
        """What the order and its parts are, as plain data."""
        key = _key(self, self.choice, self.seed)
        parts = [{"documents": part.documents, "tokens": len(part)} for part in self._parts]
        order = self.fingerprint()["order"]
        return {**order, "documents": self.documents, "tokens": len(self), "parts": parts, "key": key}

    def table(self) -> str:
        """Every document with its score, its tokens and the first part that it is in."""
        part = np.zeros(len(self.lengths), np.int64)
        for number, (begin, end) in reversed(list(enumerate(self.bounds))):
            part[begin:end] = number
        rows = zip(self.order.documents.tolist(), self.order.scores.tolist(), self.lengths, part, strict=True)
        lines = [f"{document}\t{score!r}\t{tokens}\t{number}" for document, score, tokens, number in rows]
        return "\n".join(["\t".join(COLUMNS), *lines]) + "\n"


def order_streams(
    streams: Sequence[TokenStream], choice: Choice, seed: int, folder: Path | None = None
) -> list[TokenStream]:
    """The streams in the chosen order; one that is recorded in `folder` is read, others are computed."""
    if choice.kind == "shuffled":
        return list(streams)
    ordered: list[TokenStream] = []
    for stream in streams:
        if stream.data.manifest.shards is not None:
            what = f"data.order '{choice.kind}' needs all documents at once, and this data set is in shards"
            raise BraidError(what, stream.data.address, "Use data.order=shuffled, or a data set that is not in shards.")
        check_folder_name("data.sets", stream.name)
        known = None if folder is None else _recorded(folder, stream, choice, seed)
        order = known or order_documents(orders.build(choice), stream, seed)
        ordered.append(OrderedStream(stream, choice, seed, order))
    return ordered


def order_documents(order: Order, stream: TokenStream, seed: int) -> DocumentOrder:
    """The documents of a stream by their scores."""
    scores = order.scores(stream)
    chance = random_permutation(len(scores), "order", seed, stream.name)
    ranks = np.lexsort((chance, -scores if order.config.descending else scores))
    return DocumentOrder(stream.chosen[ranks], scores[ranks])


def record_orders(streams: Sequence[TokenStream], folder: Path) -> None:
    """Write the orders of these streams, unless they are there already, and say what they are."""
    ordered = [stream for stream in streams if isinstance(stream, OrderedStream)]
    for stream in ordered:
        first = "highest" if stream.choice.options.descending else "lowest"
        pacing = f"{stream.choice.options.pacing.kind}, in {stream.parts} parts"
        by = f"{stream.documents:,} documents by {stream.choice.kind}, the {first} first"
        say(f"{stream.name}: {by} ({pacing}); in {folder / stream.name}.tsv.")
    facts = {stream.name: stream.record() for stream in ordered}
    with contextlib.suppress(BraidError):
        if all((folder / f"{name}.tsv").is_file() for name in facts) and read_json(folder / RECORD) == facts:
            return
    for stream in ordered:
        write_text(folder / f"{stream.name}.tsv", stream.table())
    if ordered:
        write_json(folder / RECORD, facts)


def _recorded(folder: Path, stream: TokenStream, choice: Choice, seed: int) -> DocumentOrder | None:
    """The recorded order of these documents by this score; None if there is none, or it is damaged."""
    try:
        facts = read_json(folder / RECORD)[stream.name]
        if facts["key"] != _key(stream, choice, seed):
            return None
        lines = read_text(folder / f"{stream.name}.tsv").splitlines()[1:]
        rows = np.array([line.split("\t")[:2] for line in lines], np.float64)
        order = DocumentOrder(rows[:, 0].astype(np.int64), rows[:, 1])
    except (BraidError, KeyError, TypeError, ValueError, IndexError):
        return None
    return order if order.sha256 == facts["sha256"] else None


def _key(stream: TokenStream, choice: Choice, seed: int) -> str:
    """A hash of everything that an order depends on."""
    known = {"order": encode(choice), "seed": seed, "data": TokenStream.fingerprint(stream), "name": stream.name}
    return json_sha256(known)
