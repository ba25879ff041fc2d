"""Amounts of training in steps, tokens or words: budgets, progress, and paces such as "every 1M words to 10M"."""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, get_args

from braidlm.core.console import count as short_count
from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.loader import Loader
from braidlm.model.config.ranges import MAX_INTEGER, Count, CountOrZero

Unit = Literal["steps", "tokens", "words"]
UNITS: tuple[Unit, ...] = get_args(Unit)
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_NUMBER = r"[0-9][0-9_]{0,30}\.?[0-9]{0,30}(?:e[0-9]{1,2})?"
"""A number of bounded length: 1e999999999 would take hours to compute."""
_AMOUNT = re.compile(rf"^\s*({_NUMBER})\s*([kmb]?)\s*(steps?|tokens?|words?)?\s*$", re.I)


def parse_amount(text: Any, unit: str = "steps") -> dict[str, Any]:
    """The count and unit of an amount such as `10M words`; `unit` is the default."""
    match = _AMOUNT.match(str(text))
    if match is None:
        what = f"'{text}' is not an amount"
        raise BraidError(what, todo="Write for example `500 steps`, `2.5M tokens`, `10M words`.")
    number, multiple, given = match.groups()
    unit = given.lower().rstrip("s") + "s" if given else unit
    value = Fraction(number.replace("_", "").rstrip(".")) * _MULTIPLES[multiple.lower()]  # floats would miss 2.3M
    if value.denominator != 1:
        raise BraidError(f"'{text}' is not a whole number of {unit}")
    if value > MAX_INTEGER:
        raise BraidError(f"'{text}' is more than {MAX_INTEGER} {unit}")
    return {"count": value.numerator, "unit": unit}


@dataclass(frozen=True)
class Amount:
    """A count of steps, tokens or words; written `500 steps`, `2.5M tokens`, `10M words`, or a number of steps."""

    count: CountOrZero
    unit: Unit = "steps"
    from_shorthand = staticmethod(parse_amount)

    def to_shorthand(self) -> str:
        return f"{short(self.count)} {self.unit}"

    __str__ = to_shorthand


@dataclass(frozen=True)
class Progress:
    """Amounts trained so far, over all processes."""

    steps: int = 0
    tokens: int = 0
    words: int = 0

    def done(self, unit: str) -> int:
        return getattr(self, unit)

    def after(self, batch: Batch) -> "Progress":
        """The progress when a step has read this batch."""
        return Progress(self.steps + 1, self.tokens + batch.token_count, self.words + batch.word_count)

    def share(self, budget: Amount) -> float:
        """Training progress in [0, 1]."""
        return min(self.done(budget.unit) / budget.count, 1.0)


def short(count: int) -> str:
    """1000000 as 1M, where nothing is lost."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def repetition(budget: Amount, loader: Loader) -> str | None:
    """A message if a budget is more than the data has, so that epochs repeat; None if not."""
    share, available = share_of_epoch(budget, loader)
    if share <= 1:
        return None
    unit = "words" if budget.unit == "words" else "tokens"
    amount = f"{short_count(budget.count)} {budget.unit}"
    if budget.unit == "steps":
        amount += f", {short_count(budget.count * loader.tokens_per_step)} tokens,"
    return (
        f"The budget is {amount} and the data has {short_count(available)} {unit}: epochs repeat, and the data is "
        f"shown {share:.1f} times on average."
    )


def never_read(budget: Amount, loader: Loader) -> str | None:
    """A message if a budget ends before documents that are read part by part are read to the last; None if not."""
    share, _ = share_of_epoch(budget, loader)
    # Shards have no order of their own: which come last is random.
    ordered = [stream for stream in loader.streams if stream.data.manifest.shards is None]
    if share >= 1 or all(stream.pacing.part_after(0) == 0 for stream in ordered):
        return None
    return (
        f"the budget of {budget} is {share:.0%} of an epoch, which reads documents in their order: the last ones are "
        "never read. With `data.order.pacing` linear or root all of them are in the pool in the end"
    )


def share_of_epoch(budget: Amount, loader: Loader) -> tuple[float, int]:
    """The budget as a share of the data, and what is read of the data: words, or else tokens."""
    available = loader.tokens_per_epoch
    if budget.unit == "words":
        kept = available / sum(map(len, loader.streams))
        available = round(kept * sum(stream.words for stream in loader.streams))
    return budget.count * (loader.tokens_per_step if budget.unit == "steps" else 1) / available, available


@dataclass(frozen=True)
class Pace:
    """An interval that may change during training; written `100 steps` or `1M words to 10M, then 10M`."""

    parts: tuple[tuple[Count, Count | None], ...]  # (every, until) in order; the last has no end
    unit: Unit

    def __post_init__(self) -> None:
        ends, problem = [until for _, until in self.parts], None
        if not self.parts or any(every < 1 for every, _ in self.parts):
            problem = "amounts above 0 are needed"
        elif None in ends[:-1]:
            problem = "each part but the last needs an end, as in `1M words to 10M`"
        elif any(later <= sooner for sooner, later in pairwise(end for end in (0, *ends) if end is not None)):
            problem = "each part must end after the one before"
        if problem is not None:
            raise BraidError(f"'{self}' is not a pace: {problem}")

    @classmethod
    def from_shorthand(cls, text: Any) -> "Pace":
        """`EVERY [UNIT] to END, then EVERY`; the first unit applies to all."""
        parts: list[tuple[int, int | None]] = []
        unit: Any = None
        for piece in re.split(r"\s*,\s*(?:then\s+)?(?:every\s+)?", str(text).strip()):
            every_text, _, until_text = re.sub(r"^every\s+", "", piece).partition(" to ")
            every = parse_amount(every_text, unit or "steps")
            unit = unit or every["unit"]
            until = parse_amount(until_text, unit) if until_text else {"count": None, "unit": unit}
            if (every["unit"], until["unit"]) != (unit, unit):
                raise BraidError(f"'{text}' is not a pace: its amounts must be in one unit")
            parts.append((every["count"], until["count"]))
        return cls(tuple(parts), unit)

    def to_shorthand(self) -> str:
        unit = f" {self.unit}"
        words = []
        for every, until in self.parts:
            words.append(f"{short(every)}{unit}" + (f" to {short(until)}" if until is not None else ""))
            unit = ""
        return ", then ".join(words)

    __str__ = to_shorthand

    def next_after(self, done: int) -> int | None:
        """The first mark beyond `done`, or None when the pace has ended."""
        begin = 0
        for every, until in self.parts:
            mark = begin + (max(done - begin, 0) // every + 1) * every
            if until is None or mark <= until:
                return mark
            begin = until
        return None

    def marks_before(self, last: int) -> int:
        """How many marks come before the amount that is the last."""
        count, mark = 0, self.next_after(0)
        while mark is not None and mark < last:
            count, mark = count + 1, self.next_after(mark)
        return count
