"""Texts that are decoded together and come and go on their own: each has a row of one cache, and a position of its own.

Rows in use are kept at the front, those that generate before those whose prompt is still read, so that passes use views
of the cache and no gathered copies. On CUDA a step is a replayed graph for 1, 2, 4, 8, ... rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braidlm.core.decoding.decoder import FixedCache, TokenDecoder, capture
from braidlm.core.devices import check_memory
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import Masks

PROMPT_TOKENS = {"cpu": 512, "cuda": 4096}
"""How many tokens of prompts are read in one pass; others wait no longer than for such a pass."""
FIRST_ROWS, FIRST_LENGTH = 4, 256
"""The size of a cache at first; it grows by doubling."""


class RowCache(FixedCache):
    """A fixed cache in which each pass is for some neighbouring rows, which begin at one position or at their own."""

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype):
        super().__init__(shapes, 0, 0, device, dtype)
        self.size, self.device = 0, device
        """How many rows there is room for."""
        self.begin(slice(0, 0), 0, 0)

    def begin(self, rows: slice, filled: int, end: int, positions: Tensor | None = None) -> None:
        """Prepare for a pass over `rows`; all of them have `filled` tokens, or write at `positions` [row].

        Keys up to `end` are returned.
        """
        self.rows, self.filled, self.end, self.positions = rows, filled, end, positions
        self.index = None if positions is None else torch.arange(len(positions), device=self.device)

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = (stored[slot][self.rows, :, : self.end] for stored in (self.keys, self.values))
        for stored, new in ((keys, key), (values, value)):
            if self.positions is None:
                stored[:, :, self.filled : self.filled + new.shape[2]] = new
            else:
                stored[self.index, :, self.positions] = new[:, :, 0].to(stored.dtype)
        return keys, values

    def resize(self, size: int, length: int) -> None:
        """Make room for so many rows of so many tokens; what is stored stays."""
        pairs = zip(self.keys, self.values, strict=True)
        one = sum(keys.shape[1] * (keys.shape[3] + values.shape[3]) for keys, values in pairs)
        added = (size * length - self.size * self.length) * one * self.keys[0].element_size() if self.keys else 0
        check_memory(added, self.device, "keys and values need", "Ask for fewer tokens, or fewer texts at once.")
        for stored in (self.keys, self.values):
            for slot, before in enumerate(stored):
                stored[slot] = before.new_zeros(size, before.shape[1], length, before.shape[3])
                stored[slot][: before.shape[0], :, : before.shape[2]] = before
        self.size, self.length = size, length

    def copy(self, source: int, target: int, filled: int) -> None:
        """Copy the first tokens of a row to another."""
        for stored in (*self.keys, *self.values):
            stored[target, :, :filled] = stored[source, :, :filled]

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        for stored in (*self.keys, *self.values):
            stored[[one, other]] = stored[[other, one]]

    def clear(self, row: int) -> None:
        """Forget a row: a weight of 0 would not hide numbers that are infinite or none from the next text."""
        for stored in (*self.keys, *self.values):
            stored[row].zero_()


class RowModel(ABC):
    """What decodes rows: a model, and how its passes use a cache of rows."""

    device: torch.device
    pads = True
    """Whether prompts of several lengths are read in one pass."""
    captures = True
    """Whether a step can be captured as a graph."""

    @abstractmethod
    def cache(self) -> RowCache:
        """An empty cache."""

    @abstractmethod
    def logits(self, tokens: Tensor, cache: RowCache, last: Sequence[int] | None) -> Tensor:
        """[row, vocabulary] after the token of each row of tokens [row, time] that `last` says, or those of all.

        The cache has been told the rows.
        """


class BraidRows(RowModel):
    """The rows of a Braid model."""

    def __init__(self, model: BraidForCausalLM):
        self.model = model.eval()
        parameter = next(p for p in model.parameters() if p.is_floating_point())  # codes have not the stream's type
        self.device, self.dtype = parameter.device, parameter.dtype

    def cache(self) -> RowCache:
        return RowCache(self.model.model.cache_shapes, self.device, self.dtype)

    def logits(self, tokens: Tensor, cache: RowCache, last: Sequence[int] | None) -> Tensor:
        options: dict[str, Any] = {"cache": cache}
        if cache.positions is not None:
            masks: Masks = {w: seen_keys(cache.positions, cache.end, w) for w in self.model.model.windows}
            options |= {"position_ids": cache.positions[:, None], "masks": masks}
        done = self.model.run(tokens, **options)
        if tokens.shape[1] == 1 and last is not None:
            done = done.at((slice(None), 0))
        elif last is not None:
            done = done.at((torch.arange(len(tokens), device=self.device), torch.tensor(last, device=self.device)))
        return self.model.head(done.hidden, **done.read)  # type: ignore[no-any-return]


def seen_keys(positions: Tensor, keys: int, window: int | None = None) -> Tensor:
    """[row, 1, 1, keys]: which keys a token at its row's position sees."""
    key = torch.arange(keys, device=positions.device)
    seen = key <= positions[:, None]
    if window is not None:
        seen = seen & (key > positions[:, None] - window)
    return seen[:, None, None]


@dataclass(eq=False)
class Row:
    """A text in a decoder of rows."""

    prompt: Sequence[int]
    index: int
    """Its row of the cache; it changes when others leave."""
    filled: int = 0
    """How many of its tokens have keys and values."""
    wants_prompt: bool = False
    """Whether the logits after every token of its prompt are asked for."""
    prompt_logits: list[Tensor] = field(default_factory=list)
    """[token, vocabulary] of each pass over its prompt."""


class Step(NamedTuple):
    """What a pass gives: the next logits [row, vocabulary] of some rows."""

    rows: list[Row]
    logits: Tensor


class RowDecoder:
    """Decodes texts of at most `length` tokens; the caller chooses each next token and hands it back by `feed`."""

    def __init__(self, model: RowModel, rows: int, length: int, graphs: bool | None = None):
        self.model, self.most, self.length, self.device = model, rows, length, model.device
        """`most` is how many texts there may be at once."""
        self.cache = model.cache()
        self.rows: list[Row] = []
        """The rows in the order of their index."""
        self.running = 0
        """How many rows, the first ones, generate; the prompts of the others are being read."""
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        """The last token of each row, which the next step reads."""
        self.positions = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.use_graphs = self.device.type == "cuda" and model.captures if graphs is None else graphs
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """A captured step and its logits, by the number of rows and of keys."""

    @torch.inference_mode()
    def enter(self, prompt: Sequence[int], room: int, wants_prompt: bool = False) -> Row:
        """Begin a text, which will have at most `room` tokens; its prompt is read by `read`."""
        size, length = self.cache.size, self.cache.length
        if len(self.rows) >= self.most:
            raise BraidError(f"all {self.most} rows are in use")
        if len(self.rows) == size or room > length:
            size = size if len(self.rows) < size else min(max(2 * size, FIRST_ROWS), self.most)
            length = length if room <= length else min(max(_doubled(room), FIRST_LENGTH), self.length)
            self.graphs.clear()
            self.cache.resize(size, length)
        row = Row(prompt, len(self.rows), wants_prompt=wants_prompt)
        self.cache.clear(row.index)
        self.rows.append(row)
        return row

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """End a text; the last rows move into the hole."""
        if row.index < self.running:
            self.running -= 1
            self._move(self.rows[self.running], row.index)
            hole = self.running
        else:
            hole = row.index
        last = self.rows.pop()
        if last.index != hole and len(self.rows) > hole:
            self._move(last, hole)

    def _move(self, row: Row, target: int) -> None:
        if row.index != target:
            self.cache.copy(row.index, target, row.filled)
            self.tokens[target] = self.tokens[row.index]
            row.index, self.rows[target] = target, row

    @property
    def reads(self) -> bool:
        """Whether a prompt has not been read yet."""
        return len(self.rows) > self.running

    @torch.inference_mode()
    def read(self) -> Step | None:
        """One pass over prompts, the oldest first; gives those that have been read to their end."""
        group = self._next_prompts()
        begin, filled = group[0].index, group[0].filled
        time = min(PROMPT_TOKENS.get(self.device.type, 512), max(len(row.prompt) for row in group) - filled)
        pieces = [list(row.prompt[filled : filled + time]) for row in group]
        ids = torch.tensor([piece + [0] * (time - len(piece)) for piece in pieces])
        # What is behind the end of a shorter prompt is seen by none of its tokens, and its next tokens replace it.
        self.cache.begin(slice(begin, begin + len(group)), filled, filled + time)
        wants_all = any(row.wants_prompt for row in group)
        last = [len(piece) - 1 for piece in pieces]
        found = self.model.logits(ids.to(self.device, non_blocking=True), self.cache, None if wants_all else last)
        for row, piece, own in zip(group, pieces, found, strict=True):
            row.filled += len(piece)
            if row.wants_prompt:
                row.prompt_logits.append(own[: len(piece)])
        done = [position for position, row in enumerate(group) if row.filled >= len(row.prompt)]
        if not done:
            return None
        for position in done:
            self._begin_running(group[position])
        if wants_all:
            logits = torch.stack([found[position, last[position]] for position in done])
        else:
            logits = found if len(done) == len(group) else found[done]
        return Step([group[position] for position in done], logits)

    def _next_prompts(self) -> list[Row]:
        """Neighbouring rows whose prompts are read together: they have been read as far as one another."""
        waiting = self.rows[self.running :]
        first = next((row for row in waiting if row.filled), waiting[0])
        if first.filled or first.wants_prompt or not self.model.pads:
            return [first]
        group = [first]
        budget, longest = PROMPT_TOKENS.get(self.device.type, 512), len(first.prompt)
        for row in self.rows[first.index + 1 :]:
            longest = max(longest, len(row.prompt))
            if row.wants_prompt or longest * (len(group) + 1) > budget:
                break
            group.append(row)
        return group

    def _begin_running(self, row: Row) -> None:
        """Put a row whose prompt has been read behind those that generate."""
        if (other := self.rows[self.running]) is not row:
            self.cache.swap(row.index, other.index)
            self.rows[row.index], self.rows[other.index] = other, row
            row.index, other.index = other.index, row.index
        self.running += 1

    @torch.inference_mode()
    def feed(self, rows: Sequence[Row], tokens: Tensor) -> None:
        """The next token [row] of some rows, which the next step reads."""
        if len(rows) == self.running and all(row.index == index for index, row in enumerate(rows)):
            self.tokens[: self.running, 0] = tokens
        else:
            at = torch.tensor([row.index for row in rows]).to(self.device, non_blocking=True)
            self.tokens[at, 0] = tokens

    @torch.inference_mode()
    def step(self) -> Step:
        """The logits after one more token of every row that generates."""
        rows = self.rows[: self.running]
        # A text that is full may be run once more before its last token is known to be the last.
        filled = [min(row.filled, self.cache.length - 1) for row in rows]
        logits = self._replay(filled) if self.use_graphs else self._eager(filled)
        for row in rows:
            row.filled += 1
        return Step(rows, logits)

    def _eager(self, filled: list[int]) -> Tensor:
        count, together = len(filled), len(set(filled)) == 1
        self.positions[:count].copy_(torch.tensor(filled), non_blocking=True)
        positions = None if together else self.positions[:count]
        self.cache.begin(slice(0, count), filled[0] if together else 0, max(filled) + 1, positions)
        return self.model.logits(self.tokens[:count], self.cache, [0] * count)

    def _replay(self, filled: list[int]) -> Tensor:
        count = min(_doubled(len(filled)), self.cache.size)
        keys = min(max(_doubled(max(filled) + 1), FIRST_LENGTH), self.cache.length)
        # The graph may be for more rows than there are: the others write where their own next token will stand.
        others = [min(row.filled, self.cache.length - 1) for row in self.rows[len(filled) : count]]
        positions = [*filled, *others, *[0] * (count - len(filled) - len(others))]
        self.positions[:count].copy_(torch.tensor(positions), non_blocking=True)
        if (count, keys) not in self.graphs:
            self.graphs[count, keys] = capture(lambda: self._fixed_step(count, keys))
        graph, logits = self.graphs[count, keys]
        graph.replay()
        return logits[: len(filled)]

    def _fixed_step(self, count: int, keys: int) -> Tensor:
        """One step in which every shape is fixed and the positions are data."""
        self.cache.begin(slice(0, count), 0, keys, self.positions[:count])
        return self.model.logits(self.tokens[:count], self.cache, [0] * count)


def _doubled(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()


class SingleText(RowDecoder):
    """One text after another, with a decoder that has no rows of their own positions."""

    def __init__(self, make: Callable[[int], TokenDecoder], length: int):
        """`make` gives a decoder for one text of at most so many tokens."""
        self.make, self.most, self.length = make, 1, length
        self.decoder: TokenDecoder | None = None
        self.rows, self.running = [], 0

    @torch.inference_mode()
    def enter(self, prompt: Sequence[int], room: int, wants_prompt: bool = False) -> Row:
        if self.rows:
            raise BraidError("the model decodes one text after another")
        if wants_prompt:
            raise BraidError("this model's decoder gives no log-probabilities of a prompt's tokens")
        if self.decoder is None or self.decoder.length < room:
            self.decoder = self.make(self.length)
        self.rows.append(Row(prompt, 0))
        return self.rows[0]

    def leave(self, row: Row) -> None:
        self.rows, self.running = [], 0

    @torch.inference_mode()
    def read(self) -> Step | None:
        assert self.decoder is not None
        (row,) = self.rows
        logits = self.decoder.prefill(torch.tensor([list(row.prompt)], device=self.decoder.device))
        row.filled, self.running = len(row.prompt), 1
        return Step([row], logits)

    def feed(self, rows: Sequence[Row], tokens: Tensor) -> None:
        self.tokens = tokens

    @torch.inference_mode()
    def step(self) -> Step:
        assert self.decoder is not None
        self.rows[0].filled += 1
        return Step(self.rows[:1], self.decoder.step(self.tokens))
