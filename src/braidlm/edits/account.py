"""The account of an edit: where each tensor of the new model comes from, and what became of each tensor there was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braidlm.bridges.bridge import listed
from braidlm.core.errors import BraidError

WAYS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "as it is": lambda parts: parts[0],
    "side by side": lambda parts: torch.cat(parts, dim=-1),
    "stacked": torch.stack,
    "stacked, transposed": lambda parts: torch.stack([part.t() for part in parts]),
    "added up": lambda parts: torch.stack(parts).sum(0),
}
"""How tensors become one."""


@dataclass(frozen=True)
class Part:
    """A tensor of a source."""

    source: str
    tensor: str


@dataclass(frozen=True)
class Taken:
    """A tensor made of others."""

    parts: tuple[Part, ...]
    how: str = "as it is"
    rows: int | None = None
    """How many of the parts' first rows are taken; all by default."""

    def make(self, read: Callable[[Part], Tensor]) -> Tensor:
        """The tensor, of parts that are read for it and then let go."""
        parts = [read(part) for part in self.parts]
        return WAYS[self.how](parts if self.rows is None else [part[: self.rows] for part in parts]).contiguous()

    @property
    def manner(self) -> str:
        """In words what happens on the way."""
        cut = f"the first {self.rows} rows" if self.rows is not None else ""
        return ", ".join(filter(None, (self.how if self.how != "as it is" else "", cut)))


@dataclass(frozen=True)
class Fresh:
    """A tensor that begins anew."""

    what: str
    """The kind of part it belongs to: `joins`."""
    module: str
    """The address of that part."""


@dataclass
class Account:
    """Every tensor of the new model, and those of the sources that are not used, each with its reason."""

    made: dict[str, Taken | Fresh] = field(default_factory=dict)
    left_out: dict[Part, str] = field(default_factory=dict)

    @property
    def taken(self) -> dict[str, Taken]:
        return {name: origin for name, origin in self.made.items() if isinstance(origin, Taken)}

    @property
    def fresh(self) -> dict[str, Fresh]:
        return {name: origin for name, origin in self.made.items() if isinstance(origin, Fresh)}

    def check(self, targets: Mapping[str, Tensor], sources: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing is missing, invented or forgotten, and every shape fits; tensors without memory will do."""
        problems = [f"{name}: nobody says where it comes from" for name in targets if name not in self.made]
        problems += [f"{name}: the new model has no such tensor" for name in self.made if name not in targets]
        named = {part for origin in self.taken.values() for part in origin.parts} | set(self.left_out)
        there = {Part(source, name) for source, tensors in sources.items() for name in tensors}
        problems += sorted(f"{part.tensor} of '{part.source}': neither used nor left out" for part in there - named)
        problems += sorted(f"{part.tensor} of '{part.source}': there is no such tensor" for part in named - there)
        if not problems:
            problems = _misshaped(self.taken, targets, sources)
        if problems:
            raise BraidError(f"not every tensor can be accounted for:{listed(problems)}")

    def record(self) -> dict[str, Any]:
        """For lineage.json."""
        made: dict[str, Any] = {}
        for name, origin in self.made.items():
            if isinstance(origin, Fresh):
                made[name] = "fresh"
                continue
            made[name] = {"from": {part.source: part.tensor for part in origin.parts}}
            if origin.manner:
                made[name]["how"] = origin.manner
        left_out: dict[str, dict[str, str]] = {}
        for part, why in self.left_out.items():
            left_out.setdefault(part.source, {})[part.tensor] = why
        return {"tensors": made, "left_out": left_out}


def _misshaped(
    taken: Mapping[str, Taken], targets: Mapping[str, Tensor], sources: Mapping[str, Mapping[str, Tensor]]
) -> list[str]:
    problems = []
    for name, origin in taken.items():
        shapes = " and ".join(str(list(sources[part.source][part.tensor].shape)) for part in origin.parts)
        wanted = list(targets[name].shape)
        try:
            found = list(origin.make(lambda part: sources[part.source][part.tensor]).shape)
        except RuntimeError:  # shapes that do not go together at all
            found = None
        if found != wanted:
            problems.append(f"{name} is to be {wanted} and cannot be made of {shapes} ({origin.manner or origin.how})")
    return problems


def parts_of(sources: Sequence[str], tensors: Sequence[str]) -> tuple[Part, ...]:
    """A tensor of each source."""
    return tuple(Part(source, tensor) for source, tensor in zip(sources, tensors, strict=True))
