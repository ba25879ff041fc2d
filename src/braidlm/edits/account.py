"""The account of an edit: where each tensor of the new model comes from, and which source tensors are left out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braidlm.bridges.bridge import bullet_list
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM

OPERATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "as it is": lambda parts: parts[0],
    "side by side": lambda parts: torch.cat(parts, dim=-1),
    "one after another": torch.cat,
    "stacked": torch.stack,
    "stacked, transposed": lambda parts: torch.stack([part.t() for part in parts]),
    "added up": lambda parts: torch.stack(parts).sum(0),
    "averaged": lambda parts: torch.stack(parts).mean(0),
}
"""By name, how several tensors become one."""


@dataclass(frozen=True)
class Part:
    """A tensor of a source."""

    source: str
    tensor: str


@dataclass(frozen=True)
class Transform:
    """What an edit makes of a tensor; it must take meta tensors, whose shapes the account checks."""

    compute: Callable[[Tensor], Tensor]
    description: str


@dataclass(frozen=True)
class Derived:
    """A tensor computed from source tensors."""

    parts: tuple[Part, ...]
    operation: str = "as it is"
    rows: int | None = None
    """How many of the parts' first rows are taken; all by default."""
    chosen_rows: tuple[int, ...] | None = None
    """Which rows of the one part are taken, in this order; all by default."""
    new_rows: tuple[int, int] | None = None
    """How many rows of zeros are inserted into the one part, and after how many of its own; the edit fills them."""
    transform: Transform | None = None
    """What is computed of the result; by default nothing."""

    def compute(self, read: Callable[[Part], Tensor]) -> Tensor:
        """The tensor; its parts are read for it and not kept."""
        parts = [read(part) for part in self.parts]
        if self.rows is not None:
            parts = [part[: self.rows] for part in parts]
        if self.chosen_rows is not None:
            parts = [part[list(self.chosen_rows)] for part in parts]
        if self.new_rows is not None:
            count, after = self.new_rows
            parts = [torch.cat((p[:after], p.new_zeros(count, *p.shape[1:]), p[after:])) for p in parts]
        whole = OPERATIONS[self.operation](parts)
        return (whole if self.transform is None else self.transform.compute(whole)).contiguous()

    @property
    def description(self) -> str:
        """The operation in words; empty where the tensor is copied."""
        cut = f"the first {self.rows} rows" if self.rows is not None else ""
        chosen = "" if self.chosen_rows is None else f"rows {', '.join(map(str, self.chosen_rows))}"
        new = "" if self.new_rows is None else f"{self.new_rows[0]} new rows after row {self.new_rows[1] - 1}"
        operation = "" if self.operation == "as it is" else self.operation
        made = "" if self.transform is None else self.transform.description
        return ", ".join(filter(None, (operation, cut, chosen, new, made)))


@dataclass(frozen=True)
class Fresh:
    """A newly initialised tensor."""

    kind: str
    """The kind of part it belongs to: `joins`."""
    module: str
    """The address of that part."""


@dataclass
class Account:
    """The origin of every tensor of the new model, and the source tensors that are not used, each with its reason."""

    origins: dict[str, Derived | Fresh] = field(default_factory=dict)
    left_out: dict[Part, str] = field(default_factory=dict)

    @property
    def derived(self) -> dict[str, Derived]:
        return {name: origin for name, origin in self.origins.items() if isinstance(origin, Derived)}

    @property
    def fresh(self) -> dict[str, Fresh]:
        return {name: origin for name, origin in self.origins.items() if isinstance(origin, Fresh)}

    def check(self, targets: Mapping[str, Tensor], sources: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise an error if a tensor is missing, unknown or forgotten, or a shape is wrong; meta tensors suffice."""
        problems = [f"{name}: it has no origin" for name in targets if name not in self.origins]
        problems += [f"{name}: the new model has no such tensor" for name in self.origins if name not in targets]
        named = {part for origin in self.derived.values() for part in origin.parts} | set(self.left_out)
        existing = {Part(source, name) for source, tensors in sources.items() for name in tensors}
        problems += sorted(f"{part.tensor} of '{part.source}': neither used nor left out" for part in existing - named)
        problems += sorted(f"{part.tensor} of '{part.source}': there is no such tensor" for part in named - existing)
        if not problems:
            problems = _misshaped(self.derived, targets, sources)
        if problems:
            raise BraidError(f"not every tensor can be accounted for:{bullet_list(problems)}")

    def record(self) -> dict[str, Any]:
        """For lineage.json."""
        tensors: dict[str, Any] = {}
        for name, origin in self.origins.items():
            if isinstance(origin, Fresh):
                tensors[name] = "fresh"
                continue
            used: dict[str, list[str]] = {}
            for part in origin.parts:
                used.setdefault(part.source, []).append(part.tensor)
            tensors[name] = {"from": {source: own[0] if len(own) == 1 else own for source, own in used.items()}}
            if origin.description:
                tensors[name]["how"] = origin.description
        left_out: dict[str, dict[str, str]] = {}
        for part, reason in self.left_out.items():
            left_out.setdefault(part.source, {})[part.tensor] = reason
        return {"tensors": tensors, "left_out": left_out}


def targets(model: BraidForCausalLM) -> dict[str, Tensor]:
    """Every tensor to account for; a tied head is the embedding."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied}


def _misshaped(
    derived: Mapping[str, Derived], targets: Mapping[str, Tensor], sources: Mapping[str, Mapping[str, Tensor]]
) -> list[str]:
    problems = []
    for name, origin in derived.items():
        shapes = " and ".join(str(list(sources[part.source][part.tensor].shape)) for part in origin.parts)
        target = list(targets[name].shape)
        try:
            shape = list(origin.compute(lambda part: sources[part.source][part.tensor]).shape)
        except RuntimeError:  # the operation refuses these shapes
            shape = None
        if shape != target:
            problems.append(
                f"{name} is to be {target} and cannot be made of {shapes} ({origin.description or origin.operation})"
            )
    return problems


def parts_of(sources: Sequence[str], tensors: Sequence[str]) -> tuple[Part, ...]:
    """A tensor of each source."""
    return tuple(Part(source, tensor) for source, tensor in zip(sources, tensors, strict=True))


Row = tuple[str, str, tuple[str, ...]]
"""A line of the table: the pattern of the new tensors, the operation, and the patterns of their source tensors."""


def account_table(account: Account, paths: Sequence[str]) -> list[str]:
    """The account as text: tensors of one kind in one line, numbers of layers as *; left-out tensors come last."""
    times: dict[Row, int] = {}
    sources: dict[Row, dict[str, dict[str, None]]] = {}

    def count(target: str, operation: str, parts: Iterable[Part]) -> None:
        patterns = [(_pattern(part.tensor, (), "stages", "layers"), part.source) for part in parts]
        row = (target, operation, tuple(dict.fromkeys(pattern for pattern, _ in patterns)))
        times[row] = times.get(row, 0) + 1
        for pattern, source in patterns:
            sources.setdefault(row, {}).setdefault(pattern, {})[source] = None

    for name, origin in account.origins.items():
        if isinstance(origin, Fresh):
            count(f"{_pattern(origin.module, (), 'layers')}.*", origin.kind, ())
        else:
            count(_pattern(name, paths, "layers", "stack", "experts"), origin.description, origin.parts)
    for part, reason in account.left_out.items():
        count("-", f"left out: {reason}", (part,))
    lines = [[str(number), row[0], _origin_text(sources.get(row, {})), row[1]] for row, number in times.items()]
    return columns([["times", "tensor", "from", "how"], *lines])


def _origin_text(sources: Mapping[str, Iterable[str]]) -> str:
    """`stories, maths: model.embedding.weight`."""
    return " + ".join(f"{', '.join(names)}: {tensor}" for tensor, names in sources.items()) or "fresh"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _pattern(name: str, paths: Sequence[str], *numbered: str) -> str:
    """A tensor's name with * for the numbers below these words, and for a path's name and the number of its block."""
    for word in numbered:
        name = re.sub(rf"(?<=\b{word}\.)\d+", "*", name)
    if paths:
        name = re.sub(rf"(?<=\.paths\.)({'|'.join(map(re.escape, paths))})\.\d+", "*.*", name)
    return name
