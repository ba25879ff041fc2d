"""Streams whose documents have an order, and the record of that order in a run's folder.

    RUN/order/order.json    kind, options, seed and hash of each data set's order
    RUN/order/NAME.tsv      its documents, first to last: number in the data set, score, tokens, part

The record is also the cache: a run that goes on reads it, so that it has the same order on any machine.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.console import say
from braidlm.core.errors import BraidError, check_folder_name
from braidlm.core.files import write_json, write_text
from braidlm.core.reading import read_json, read_text
from braidlm.data.loading.order import Order, Pacing, orders, pacings
from braidlm.data.loading.streams import TokenStream, random_permutation
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import encode

FOLDER = "order"
RECORD = "order.json"
COLUMNS = ("document", "score", "tokens", "part")


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of one data set, first to last."""

    documents: np.ndarray
    """Their numbers in the data set."""
    scores: np.ndarray

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest()


class OrderedStream(TokenStream):
    """A stream that is read by parts of an order, each of which is a stream of its own."""

    def __init__(self, stream: TokenStream, choice: Choice, seed: int, order: DocumentOrder):
        super().__init__(stream.data, stream.subset, stream.name)
        self.choice, self.seed, self.order = choice, seed, order
        self.pacing: Pacing = pacings.build(choice.options.pacing)
        starts = np.asarray(self.data.document_starts)
        self.lengths = starts[order.documents + 1] - starts[order.documents]
        ends = np.cumsum(self.lengths)
        shares = np.array(self.pacing.parts()) * ends[-1]
        # A part ends with the document that completes its share of the tokens.
        self.bounds = np.where(shares > 0, np.searchsorted(ends, shares - 0.5) + 1, 0)
        if (self.bounds[:, 0] >= self.bounds[:, 1]).any():
            raise BraidError(
                f"its {self.documents:,} documents cannot be divided into {len(self.bounds)} parts of equal size",
                f"data set '{self.name}'",
                "Divide them into fewer parts (`data.order.pacing`).",
            )
        self.parts = [self.of_documents(order.documents[begin:end]) for begin, end in self.bounds]

    def part_at(self, part: int, progress: float) -> int:
        return self.pacing.part_at(part, progress)

    def part_after(self, part: int) -> int:
        return self.pacing.part_after(part)

    def fingerprint(self) -> dict[str, Any]:
        """A saved position is one in this order."""
        return super().fingerprint() | {"order": self.facts()}

    def facts(self) -> dict[str, Any]:
        """What the order is, as plain data."""
        return {**encode(self.choice), "seed": self.seed, "sha256": self.order.sha256}

    def summary(self) -> str:
        """The order in a sentence."""
        first = "highest" if self.choice.options.descending else "lowest"
        pacing = f"{self.choice.options.pacing.kind}, in {len(self.parts)} parts"
        return f"{self.name}: {self.documents:,} documents by {self.choice.kind}, the {first} first ({pacing})"

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
        say(f"{stream.summary()}; in {folder / stream.name}.tsv.")
    facts = {stream.name: _record(stream) for stream in ordered}
    with contextlib.suppress(BraidError):
        if all((folder / f"{name}.tsv").is_file() for name in facts) and read_json(folder / RECORD) == facts:
            return
    for stream in ordered:
        write_text(folder / f"{stream.name}.tsv", stream.table())
    if ordered:
        write_json(folder / RECORD, facts)


def _record(stream: OrderedStream) -> dict[str, Any]:
    key = _key(stream, stream.choice, stream.seed)
    parts = [{"documents": part.documents, "tokens": len(part)} for part in stream.parts]
    return {**stream.facts(), "documents": stream.documents, "tokens": len(stream), "parts": parts, "key": key}


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
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
