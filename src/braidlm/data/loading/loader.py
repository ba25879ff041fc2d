"""The loader: batches in an order that depends on the seed alone, the same on any number of processes, resumable."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from braidlm.core.differences import changes
from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch, Rows, cut_at
from braidlm.data.loading.chunking import Chunking
from braidlm.data.loading.mixing import Mix, MixConfig, assign_rows
from braidlm.data.loading.streams import TokenStream
from braidlm.model.config.strict import encode


@dataclass(frozen=True)
class Place:
    """Where one data set is."""

    epoch: int = 0
    chunk: int = 0
    """Chunks of this epoch that have been shown."""


@dataclass(frozen=True)
class Position:
    """Where the whole loader is, between two batches; an entry per data set."""

    places: list[Place]
    credits: list[float]
    """What the mix owes each data set."""


@dataclass(frozen=True)
class _Plan:
    """An epoch of one data set."""

    starts: np.ndarray
    """Of its chunks, in order."""
    last: int
    """How many positions of the last chunk are shown."""

    def __len__(self) -> int:
        return len(self.starts)


class Loader:
    """Batches from one data set or a mix. Rank r of `world` owns the global rows [r * n, (r + 1) * n).

    A row never holds two data sets. For one global batch size, every number of processes sees the same global rows.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        chunking: Chunking,
        length: int,
        rows: int,
        accumulation: int = 1,
        seed: int = 0,
        mix: MixConfig | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        """`rows` per process and forward pass; an optimizer step takes `accumulation` times as many."""
        # By name, so that the order in which a recipe lists its data sets has no effect.
        self.streams = sorted(streams, key=lambda stream: stream.name)
        self.chunking, self.length, self.seed = chunking, length, seed
        self.local_rows = rows * accumulation
        self.global_rows = self.local_rows * world
        self.rank = rank
        _check(self.streams, chunking, length)
        self._mix_config = mix or MixConfig()
        self._mix = Mix(mix, {stream.name: len(stream) for stream in self.streams})
        self._position = Position([Place()] * len(self.streams), [0.0] * len(self.streams))
        self._plans: list[dict[int, _Plan]] = [{} for _ in self.streams]
        self._drawn: tuple[Rows, Position] | None = None
        self._cut = 0
        self._progress = 0.0

    @property
    def names(self) -> list[str]:
        """The data sets' names, in the order of `Batch.sources`."""
        return [stream.name for stream in self.streams]

    @property
    def epochs(self) -> dict[str, float]:
        """How often each data set has been shown."""
        places = zip(self.names, self._position.places, strict=True)
        return {
            name: place.epoch + place.chunk / len(self._plan(index, place.epoch))
            for index, (name, place) in enumerate(places)
        }

    def next_batch(self, progress: float = 0.0, words_left: int | None = None, tokens_left: int | None = None) -> Batch:
        """The rows of the next optimizer step at training progress in [0, 1].

        A batch that would pass `words_left` or `tokens_left` comes in pieces: this call trains up to the mark, and
        the next ones return the same rows with the rest of their labels.
        """
        if not self._cut:
            self._progress = progress  # a cut batch keeps the mix it began with
        if self._drawn is None:
            self._drawn = self._draw(self._progress)
        rows, after = self._drawn
        piece = rows.piece(self._cut, cut_at(rows.shown_words, self._cut, words_left, tokens_left))
        if piece.is_last_piece:
            self._position, self._drawn, self._cut = after, None, 0
            self._forget_past_plans()
        else:
            self._cut = piece.stop
        return piece

    def state(self) -> dict[str, Any]:
        """Everything that `load_state` needs, as plain JSON data; the same on every rank."""
        return {
            "facts": self._facts(),
            "places": {n: [p.epoch, p.chunk] for n, p in zip(self.names, self._position.places, strict=True)},
            "credits": dict(zip(self.names, self._position.credits, strict=True)),
            "cut": self._cut,
            "progress": self._progress,
            "global_rows": self.global_rows,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on at the very batch, or piece of one, at which `state` was taken."""
        problems = changes(state["facts"], self._facts())
        if state["cut"] and state["global_rows"] != self.global_rows:
            problems.append(
                f"the position is inside a batch of {state['global_rows']} rows, and a batch has {self.global_rows} now"
            )
        if problems:
            raise BraidError(
                "the saved position belongs to other data: " + "; ".join(problems),
                todo="Resume with the data and the settings of the run that was saved, or begin a new run.",
            )
        places = [Place(*state["places"][name]) for name in self.names]
        self._position = Position(places, [float(state["credits"][name]) for name in self.names])
        self._cut, self._progress, self._drawn = int(state["cut"]), float(state["progress"]), None
        self._plans = [{} for _ in self.streams]

    def _draw(self, progress: float) -> tuple[Rows, Position]:
        """The batch at the present position, and the position after it."""
        sources, credits = assign_rows(self.global_rows, self._mix.shares(progress), self._position.credits)
        words = np.empty((self.global_rows, self.length), np.uint8)
        shown = np.empty(self.global_rows, np.int64)
        tokens = np.empty((self.local_rows, self.length + 1), np.int64)
        first = self.rank * self.local_rows
        places = list(self._position.places)
        for index, stream in enumerate(self.streams):
            here = np.flatnonzero(sources == index)
            if not len(here):
                continue
            starts, shown[here], places[index] = self._take(index, places[index], len(here))
            positions = stream.positions(starts, self.length + 1)
            words[here] = stream.word_starts_at(positions[:, :-1])
            mine = slice(*np.searchsorted(here, [first, first + self.local_rows]))
            tokens[here[mine] - first] = stream.tokens_at(positions[mine])
        return Rows(tokens, words, sources, first, shown), Position(places, credits)

    def _take(self, index: int, place: Place, count: int) -> tuple[np.ndarray, np.ndarray, Place]:
        """The starts of a data set's next `count` chunks, how much of each is shown, and where it is after them."""
        parts, shown = [], np.full(count, self.length, np.int64)
        taken = 0
        while taken < count:
            plan = self._plan(index, place.epoch)
            part = plan.starts[place.chunk : place.chunk + count - taken]
            parts.append(part)
            taken += len(part)
            done = place.chunk + len(part)
            place = Place(place.epoch, done)
            if done == len(plan):
                shown[taken - 1] = plan.last
                place = Place(place.epoch + 1)
        return np.concatenate(parts), shown, place

    def _plan(self, index: int, epoch: int) -> _Plan:
        plans = self._plans[index]
        if epoch not in plans:
            stream = self.streams[index]
            starts = self.chunking.starts(stream, self.length, epoch, self.seed)
            if not len(starts):
                raise RuntimeError(f"chunking '{self.chunking.facts()['kind']}' gave an epoch without chunks")
            plans[epoch] = _Plan(starts, self.chunking.last(stream, starts, self.length))
        return plans[epoch]

    def _forget_past_plans(self) -> None:
        for plans, place in zip(self._plans, self._position.places, strict=True):
            for epoch in [e for e in plans if e < place.epoch]:
                del plans[epoch]

    def _facts(self) -> dict[str, Any]:
        """What a saved position is true of."""
        return {
            "seed": self.seed,
            "length": self.length,
            "chunking": self.chunking.facts(),
            "mix": encode(self._mix_config),
            "data": {stream.name: stream.fingerprint() for stream in self.streams},
        }


def _check(streams: Sequence[TokenStream], chunking: Chunking, length: int) -> None:
    """Refuse what cannot be loaded, before any work begins."""
    if not streams:
        raise BraidError("there is no data set to load", todo="Name at least one packed data set.")
    names = [stream.name for stream in streams]
    for name in sorted({n for n in names if names.count(n) > 1}):
        raise BraidError(f"two data sets are called '{name}'", todo="Give each a name of its own.")
    first = streams[0]
    for stream in streams:
        chunking.check(stream, length)
        if stream.data.manifest.tokenizer != first.data.manifest.tokenizer:
            raise BraidError(
                f"data sets '{first.name}' and '{stream.name}' were prepared with different tokenizers",
                todo="Prepare them with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`.",
            )
