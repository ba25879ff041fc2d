"""What a conversion will do, said before it is done."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from braidlm.bridges.bridge import Link
from braidlm.bridges.checkpoint import Shapes


@dataclass
class Plan:
    """Which tensors become which, and what is worth knowing about it."""

    title: str
    links: list[Link]
    shapes: Shapes
    """Of the foreign tensors that take part."""
    outward: bool
    """Whether it goes from Braid to the other format."""
    notes: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """How many tensors of the other format take part."""
        return sum(len(link.foreign) for link in self.links)

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold; a shared matrix counts once."""
        return sum(prod(self.shapes[name]) for link in self.links for name in link.foreign)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """From, to, how, and how many times, with layer numbers written as *."""
        pairs = (
            (_pattern(_together(link.foreign)), _pattern(link.braid), link.manner(self.outward)) for link in self.links
        )
        counted = Counter(
            (braid, foreign, how) if self.outward else (foreign, braid, how) for foreign, braid, how in pairs
        )
        return [(*row, times) for row, times in counted.items()]

    def lines(self) -> list[str]:
        """The plan as text."""
        made = f"{self.tensors} tensors of theirs, {len(self.links)} of ours, {self.parameters:,} parameters"
        rows = [
            f"  {times:>3} x {source} -> {target}{f' ({how})' if how else ''}"
            for source, target, how, times in self.rows()
        ]
        return [f"{self.title}: {made}", *rows, *(f"  note: {note}" for note in self.notes)]


def counted_patterns(names: Iterable[str]) -> str:
    """'12 x h.*.attn.bias, 1 x ...' of many names."""
    return ", ".join(f"{times} x {pattern}" for pattern, times in Counter(map(_pattern, names)).items())


def _together(names: tuple[str, ...]) -> str:
    """`self_attn.{q_proj,k_proj}.weight` for names that differ in one place."""
    places = (list(dict.fromkeys(place)) for place in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(words[0] if len(words) == 1 else f"{{{','.join(words)}}}" for words in places)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)
