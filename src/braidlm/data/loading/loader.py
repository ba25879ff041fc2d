"""The loader: batches in an order that depends only on the seed, the same on any number of processes, resumable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from braidlm.core.differences import changes, with_changes
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.loading.batches import Batch, GlobalBatch, cut_at
from braidlm.data.loading.chunking import Chunking
from braidlm.data.loading.config import CurriculumPoint, MixtureConfig
from braidlm.data.loading.streams import TokenStream, poisson_sample
from braidlm.model.config.strict import encode


class StreamPosition(NamedTuple):
    """The position in one data set, between two draws of chunks."""

    epoch: int = 0
    """How many epochs were begun before, of whatever part."""
    chunk: int = 0
    """How many chunks of this epoch have been trained; with Poisson sampling, how many batches."""
    part: int = 0
    """The part of the data set that this epoch reads; see `TokenStream.part`."""
    before: float = 0.0
    """How often the data set was trained before this epoch."""


@dataclass(frozen=True)
class Place:
    """The next row of the chunks that were drawn, or that are drawn next."""

    row_length: int
    """Tokens of a row: a chunk is one, or several in turn."""
    progress: float = 0.0
    """The progress of the training when the chunks were drawn, which decides their mixture."""
    column: int = 0
    """The position in every chunk at which its next row begins."""
    offset: int = 0
    """How many trained positions of the next batch were trained before a mark."""

    @property
    def begins_a_draw(self) -> bool:
        return not self.column and not self.offset


Chunks = tuple[np.ndarray, np.ndarray, np.ndarray, StreamPosition]


class Loader:
    """Batches from one data set or a mixture. Rank r of `world` has the global rows [r * n, (r + 1) * n).

    A row never mixes data sets. For one global batch size, the global rows are the same for any number of processes.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        chunking: Chunking,
        length: int,
        rows: int,
        accumulation: int = 1,
        seed: int = 0,
        mix: MixtureConfig | None = None,
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
        check_streams(self.streams, chunking, length)
        self._mix_config = mix or MixtureConfig()
        self._mixture = Mixture(mix, {stream.name: chunking.size(stream, length) for stream in self.streams})
        self._kept_rows = self._fixed_rows() if chunking.keeps_rows else None
        self._positions, self._credits = [StreamPosition()] * len(self.streams), [0.0] * len(self.streams)
        self._epochs: list[dict[int, tuple[TokenStream, np.ndarray, np.ndarray]]] = [{} for _ in self.streams]
        self._drawn: tuple[GlobalBatch, list[StreamPosition], list[float]] | None = None
        self._place = Place(length)
        self._key: int | None = None
        self._mean_counts: tuple[int, int] | None = None

    def use_poisson_sampling(self, key: int) -> tuple[int, int]:
        """From here on, each row of a data set is in each batch by itself, with the probability that `rates` has.

        Batches differ in size and are never cut. Each counts as the tokens and words of the mean batch, which are
        returned (words in proportion to tokens), so that no count tells what was drawn. Who knows the key knows the
        batches; it is saved with the position.
        """
        assert self.local_rows == self.global_rows, "one process draws the rows"
        self._key, tokens, words = key, 0.0, 0.0
        for index, (stream, rate) in enumerate(zip(self.streams, self.rates.values(), strict=True)):
            trained = rate * int(self._epoch(index, StreamPosition())[2].sum())
            tokens, words = tokens + trained, words + trained * stream.words / len(stream)
        self._mean_counts = max(round(tokens), 1), max(round(words), 1)
        return self._mean_counts

    @property
    def names(self) -> list[str]:
        """The data sets' names, in the order of `GlobalBatch.sources`."""
        return [stream.name for stream in self.streams]

    @property
    def epochs(self) -> dict[str, float]:
        """How many epochs of each data set have been trained."""
        trained, share, after = {}, 0.0, self._positions
        if self._place.column:  # of what is drawn, every chunk is trained as far as the others
            drawn, after, _ = self._draw()
            share = self._place.column / int(drawn.trained_lengths.max())
        for index, name in enumerate(self.names):
            begin, end = (self._trained(index, positions[index]) for positions in (self._positions, after))
            trained[name] = begin + share * (end - begin)
        return trained

    @property
    def tokens_per_step(self) -> int:
        """The tokens that a step trains in the mean, but where epochs end."""
        positions = sum(self.chunking.size(stream, self.length) for stream in self.streams)
        return round(self.global_rows * self.length * self.tokens_per_epoch / positions)

    @property
    def tokens_per_epoch(self) -> int:
        """The tokens of all data sets that an epoch trains."""
        return sum(self.chunking.tokens(stream, self.length) for stream in self.streams)

    @property
    def rates(self) -> dict[str, float]:
        """How much of each data set's epoch a step reads in the mean, with the shares of the beginning."""
        rows = zip(self.rows_per_epoch.items(), self._mixture.shares(0.0), strict=True)
        return {name: self.global_rows * share / count for (name, count), share in rows}

    @property
    def rows_per_epoch(self) -> dict[str, int]:
        """How many rows the first epoch of each data set has."""
        return {name: len(self._epoch(index, StreamPosition())[1]) for index, name in enumerate(self.names)}

    def next_batch(
        self,
        progress: float = 0.0,
        words_left: int | None = None,
        tokens_left: int | None = None,
        row_length: int | None = None,
    ) -> Batch:
        """The rows of the next optimizer step at training progress in [0, 1].

        A batch that would pass `words_left` or `tokens_left` is cut: this call trains up to the mark, and the next
        calls return the same rows with the remaining labels.

        With a `row_length`, which divides that of chunks, a batch has as many more rows as they are shorter. The chunks
        of several batches are drawn at once and read side by side, so that each row is of another chunk; until they
        are read to their ends, mixture and length stay.
        """
        if self._place.begins_a_draw:
            self._place = Place(row_length or self.length, progress)
        drawn, after, credits = self._draw()
        batch, offset = drawn.columns(self._place.column, self._place.row_length), self._place.offset
        marks = (words_left, tokens_left) if self._key is None else (None, None)
        piece = batch.piece(offset, cut_at(batch.trained_words, offset, *marks))
        column = self._place.column + (self._place.row_length if piece.is_last_piece else 0)
        self._place = replace(self._place, column=column, offset=0 if piece.is_last_piece else piece.stop)
        if column >= drawn.trained_lengths.max(initial=0):
            self._positions, self._credits, self._drawn, self._place = after, credits, None, Place(self.length)
            for index, position in enumerate(after):
                epochs = self._epochs[index]
                self._epochs[index] = {number: epochs[number] for number in epochs if number >= position.epoch}
        return piece

    def state(self) -> dict[str, Any]:
        """Everything that `load_state` needs, as plain JSON data; the same on every rank."""
        return {
            "facts": self._fingerprint(),
            "places": {n: list(p) for n, p in zip(self.names, self._positions, strict=True)},
            "credits": dict(zip(self.names, self._credits, strict=True)),
            "cut": self._place.offset,
            "column": self._place.column,
            "row_length": self._place.row_length,
            "progress": self._place.progress,
            "global_rows": self.global_rows,
            **({} if self._key is None else {"key": self._key}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at the batch, or piece of one, at which `state` was taken."""
        problems = list(changes(state["facts"], self._fingerprint()))
        # Runs of before these were saved cut shorter rows out of each batch.
        row_length, column = state.get("row_length", self.length), state.get("column", 0)
        place = Place(row_length, float(state["progress"]), column, int(state["cut"]))
        matters = self.chunking.keeps_rows or not place.begins_a_draw
        if matters and state["global_rows"] != self.global_rows:
            then, now = state["global_rows"], self.global_rows
            inside = f"the position is inside a batch of {then} rows, and a batch has {now} now"
            own = f"each of {then} rows read a text of its own, and there are {now} now"
            problems.append(own if place.begins_a_draw else inside)
        if problems:
            todo = "Resume with the data and the settings of the run that was saved, or begin another: name=NAME."
            raise BraidError(with_changes("the saved position belongs to other data", problems), todo=todo)
        places = [state["places"][name] for name in self.names]
        # Earlier versions, which knew no parts, saved the epoch and the chunk.
        self._positions = [StreamPosition(*(p if len(p) > 2 else (*p, 0, float(p[0])))) for p in places]
        self._credits = [float(state["credits"][name]) for name in self.names]
        self._place, self._drawn, self._key = place, None, state.get("key")
        self._epochs = [{} for _ in self.streams]

    def _draw(self) -> tuple[GlobalBatch, list[StreamPosition], list[float]]:
        """The chunks of a batch at the current positions, and the positions and credits (`assign_rows`) after them.

        The chunks of several batches with shorter rows are the rows of one.
        """
        if self._drawn is not None:
            return self._drawn
        progress, batches = self._place.progress, self.length // self._place.row_length
        sources, credits = self._kept_rows, self._credits
        if self._key is not None:
            taken = {index: self._sample(index) for index in range(len(self.streams))}
            sources = np.repeat(np.arange(len(taken)), [len(lengths) for _, lengths, _, _ in taken.values()])
        else:
            if sources is None:
                sources, credits = assign_rows(batches * self.global_rows, self._mixture.shares(progress), credits)
            counts = enumerate(np.bincount(sources).tolist())
            taken = {index: self._take(index, count, progress) for index, count in counts if count}
        global_rows, local_rows = len(sources), len(sources) * self.local_rows // self.global_rows
        words = np.empty((global_rows, self.length), np.uint8)
        trained_lengths = np.empty(global_rows, np.int64)
        continues = np.zeros(global_rows, bool)
        targets = np.empty(words.shape, bool) if any(stream.has_prompts for stream in self.streams) else None
        tokens = np.empty((local_rows, self.length + 1), np.int64)
        positions = np.empty((local_rows, self.length), np.int64)
        first = self.rank * local_rows
        after = list(self._positions)
        for index, chunks in taken.items():
            stream, rows = self.streams[index], np.flatnonzero(sources == index)
            places, trained_lengths[rows], continues[rows], after[index] = chunks
            words[rows] = stream.word_starts_at(places[:, :-1])
            if targets is not None:
                targets[rows] = stream.targets_at(places[:, 1:])
            local = slice(*np.searchsorted(rows, [first, first + local_rows]))
            tokens[rows[local] - first] = stream.tokens_at(places[local])
            positions[rows[local] - first] = places[local, :-1]
        own, mean = continues[first : first + local_rows], self._mean_counts
        batch = GlobalBatch(tokens, words, sources, first, trained_lengths, own, positions, targets, mean)
        self._drawn = batch, after, credits
        return self._drawn

    def _fixed_rows(self) -> np.ndarray:
        """The data set of each row in every batch: the shares of the mix, rounded to whole rows."""
        kind = self.chunking.as_dict()["kind"]
        if self._mix_config.curriculum:
            what = f"with chunking '{kind}' each row reads one data set, so its share cannot change during the training"
            raise BraidError(what, "mix.curriculum", "Give `weights`, or use chunking 'contiguous'.")
        shares = self._mixture.shares(0.0)
        rows, _ = assign_rows(self.global_rows, shares, [0.0] * len(shares))
        for index, name in enumerate(self.names):
            if shares[index] > 0 and index not in rows:
                what = (
                    f"with chunking '{kind}' each row reads one data set, and {self.global_rows} rows leave none for "
                )
                what += f"'{name}', whose share is {shares[index]:.2%}"
                todo = "Take a larger training.batch, give it a larger weight, or use chunking 'contiguous'."
                raise BraidError(what, "mix", todo)
        return rows

    def _sample(self, index: int) -> Chunks:
        """Those of a data set's chunks that are drawn for the batch, and its position after it."""
        position, key = self._positions[index], self._key or 0
        stream, starts, trained = self._epoch(index, position)
        drawn = poisson_sample(len(starts), self.rates[stream.name], key, stream.name, position.chunk)
        places = self.chunking.places(stream, starts[drawn], trained[drawn], self.length)
        return places, trained[drawn], np.zeros(len(drawn), bool), position._replace(chunk=position.chunk + 1)

    def _take(self, index: int, count: int, progress: float) -> Chunks:
        """A data set's next `count` chunks, and its position after them.

        A chunk is the file positions [length + 1] of its tokens, how many of them are trained, and whether its text
        continues that of the same row in the batch before.
        """
        position, pacing = self._positions[index], self.streams[index].pacing
        places, lengths, continues = [], [], np.zeros(count, bool)
        taken = 0
        while taken < count:
            part = pacing.part_at(position.part, progress)
            if part != position.part:  # the part that is due begins an epoch of its own
                position = StreamPosition(position.epoch + 1, 0, part, self._trained(index, position))
            stream, begins, trained = self._epoch(index, position)
            chunks = slice(position.chunk, position.chunk + count - taken)
            starts = begins[chunks]
            if self.chunking.keeps_rows:  # the first `count` chunks of an epoch begin the rows' texts
                continues[taken : taken + len(starts)] = np.arange(len(starts)) + position.chunk >= count
            places.append(self.chunking.places(stream, starts, trained[chunks], self.length))
            lengths.append(trained[chunks])
            taken += len(starts)
            position = position._replace(chunk=position.chunk + len(starts))
            if position.chunk == len(begins):
                after = self._trained(index, position)
                position = StreamPosition(position.epoch + 1, 0, pacing.part_after(part), after)
        return np.concatenate(places), np.concatenate(lengths), continues, position

    def _trained(self, index: int, position: StreamPosition) -> float:
        """How often the data set was trained up to a position."""
        stream, starts, _ = self._epoch(index, position)
        if self._key is not None:
            return position.chunk * self.rates[stream.name]
        return position.before + len(stream) / len(self.streams[index]) * position.chunk / len(starts)

    def _epoch(self, index: int, position: StreamPosition) -> tuple[TokenStream, np.ndarray, np.ndarray]:
        """The stream of an epoch, where its chunks start in their order, and how many positions of each are trained."""
        epochs, number = self._epochs[index], position.epoch
        if number not in epochs:
            stream = self.streams[index].part(position.part, self.seed)
            rows = 1 if self._kept_rows is None else int((self._kept_rows == index).sum())
            starts = self.chunking.starts(stream, self.length, number, self.seed, max(rows, 1))
            if not len(starts):
                raise RuntimeError(f"chunking '{self.chunking.as_dict()['kind']}' gave an epoch without chunks")
            trained_lengths = self.chunking.trained_lengths(stream, starts, self.length)
            epochs[number] = stream, starts, trained_lengths
        return epochs[number]

    def _fingerprint(self) -> dict[str, Any]:
        """Values that must be equal for a saved position to be valid."""
        return {
            "seed": self.seed,
            "length": self.length,
            "chunking": self.chunking.as_dict(),
            "mix": encode(self._mix_config),
            "data": {stream.name: stream.fingerprint() for stream in self.streams},
            **({} if self._key is None else {"sampling": "poisson"}),
        }


def check_streams(streams: Sequence[TokenStream], chunking: Chunking, length: int) -> None:
    """Refuse no stream at all, two of one name, streams that are too short, and different tokenizers."""
    if not streams:
        raise BraidError("there is no data set to load", todo="Name at least one packed data set.")
    names = [stream.name for stream in streams]
    for name in sorted({n for n in names if names.count(n) > 1}):
        raise BraidError(f"two data sets are called '{name}'", todo="Give each a name of its own.")
    first = streams[0]
    for stream in streams:
        chunking.check(stream, length)
        if stream.parts > 1:
            chunking.check_parts(stream, length)
        if stream.data.manifest.tokenizer != first.data.manifest.tokenizer:
            what = f"data sets '{first.name}' and '{stream.name}' were prepared with different tokenizers"
            todo = "Prepare them with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`."
            raise BraidError(what, todo=todo)


class Mixture:
    """The shares of named data sets at any point of the training."""

    def __init__(self, config: MixtureConfig | None, sizes: Mapping[str, int]):
        """`sizes` of the data sets, as their shares are without weights; its order is the order of the shares."""
        config = config or MixtureConfig()
        points = config.curriculum or [
            CurriculumPoint(0.0, config.weights or {n: float(size) for n, size in sizes.items()})
        ]
        named = {name for point in points for name in point.weights}
        unknown = sorted(named - set(sizes))
        problems = [f"a weight is given for '{n}', which is no data set.{did_you_mean(n, sizes)}" for n in unknown]
        problems += [f"data set '{n}' has no weight; give it one (0 to leave it out)" for n in sizes if n not in named]
        if problems:
            raise BraidError("\n".join(problems), "mix")
        self._points = [point.at for point in points]
        table = np.array([[point.weights.get(name, 0.0) for name in sizes] for point in points])
        # Shares are interpolated, not weights, so the unit of a point's weights has no effect.
        self._shares = table / table.sum(axis=1, keepdims=True)

    def shares(self, progress: float) -> list[float]:
        """The share of each data set at `progress` in [0, 1]; they sum to 1."""
        return [float(np.interp(progress, self._points, column)) for column in self._shares.T]


def assign_rows(rows: int, shares: Sequence[float], credits: Sequence[float]) -> tuple[np.ndarray, list[float]]:
    """The data set of each of the next rows, and the credits after them (zeros at the beginning).

    A data set's credit is the rows it should have had minus the rows it had. Of those that can take a row without
    getting too far ahead, the one with the earliest deadline gets it (Tijdeman's chairman assignment). With constant
    shares no credit ever leaves (-1, 1), which giving each row to the largest credit does not guarantee.
    """
    credit = list(credits)
    margin = 1.0 / max(2 * len(shares) - 2, 1)
    active = [i for i, share in enumerate(shares) if share > 0]
    chosen = np.zeros(rows, np.int64)
    for row in range(rows):
        for i in active:
            credit[i] += shares[i]
        ready = [i for i in active if credit[i] >= margin - 1e-9]
        if ready:
            pick = min(ready, key=lambda i: (1.0 - margin - credit[i]) / shares[i])
        else:  # only after the shares have changed
            pick = max(active, key=lambda i: credit[i])
        credit[pick] -= 1.0
        chosen[row] = pick
    return chosen, credit
