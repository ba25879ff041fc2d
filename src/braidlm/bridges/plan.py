"""What a conversion will do, shown before it is done."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from braidlm.bridges.bridge import TensorMapping
from braidlm.bridges.checkpoint import Shapes


@dataclass
class ConversionPlan:
    """Which tensors become which, with notes for the user."""

    title: str
    mappings: list[TensorMapping]
    shapes: Shapes
    """Shapes of the foreign tensors that are converted."""
    exporting: bool
    """Whether the conversion is from Braid to the other format."""
    notes: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """How many tensors of the other format are converted."""
        return sum(len(mapping.foreign) for mapping in self.mappings)

    @property
    def parameters(self) -> int:
        """How many parameters the tensors hold; a shared matrix counts once."""
        return sum(prod(self.shapes[name]) for mapping in self.mappings for name in mapping.foreign)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Source, target, description and count of equal mappings, with layer numbers replaced by *."""
        pairs = (
            (_pattern(_merged_names(mapping.foreign)), _pattern(mapping.braid), mapping.describe(self.exporting))
            for mapping in self.mappings
        )
        counted = Counter(
            (braid, foreign, change) if self.exporting else (foreign, braid, change) for foreign, braid, change in pairs
        )
        return [(*row, times) for row, times in counted.items()]

    def lines(self) -> list[str]:
        """The plan as text."""
        summary = f"{self.tensors} tensors of theirs, {len(self.mappings)} of ours, {self.parameters:,} parameters"
        rows = [
            f"  {times:>3} x {source} -> {target}{f' ({change})' if change else ''}"
            for source, target, change, times in self.rows()
        ]
        return [f"{self.title}: {summary}", *rows, *(f"  note: {note}" for note in self.notes)]


def counted_patterns(names: Iterable[str]) -> str:
    """'12 x h.*.attn.bias, 1 x ...' of many names."""
    return ", ".join(f"{times} x {pattern}" for pattern, times in Counter(map(_pattern, names)).items())


def _merged_names(names: tuple[str, ...]) -> str:
    """`self_attn.{q_proj,k_proj}.weight` for names that differ in one segment."""
    segments = (list(dict.fromkeys(words)) for words in zip(*(name.split(".") for name in names), strict=True))
    return ".".join(words[0] if len(words) == 1 else f"{{{','.join(words)}}}" for words in segments)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)
