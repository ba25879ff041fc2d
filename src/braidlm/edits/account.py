"""The account of an edit: where each tensor of the new model comes from, and which source tensors are left out."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from braidlm.core.differences import bullet_list
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.model.config.braid_config import BraidConfig

if TYPE_CHECKING:
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
SOURCE = "model"
"""The name of the source in the account of an edit that has one."""


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
    """How many of each part's first rows are taken; all by default."""
    transform: Transform | None = None
    """What is computed of the result; by default nothing."""

    def compute(self, read: Callable[[Part], Tensor]) -> Tensor:
        """The tensor; its parts are read for it and not kept."""
        parts = [read(part) for part in self.parts]
        whole = OPERATIONS[self.operation](parts if self.rows is None else [part[: self.rows] for part in parts])
        return (whole if self.transform is None else self.transform.compute(whole)).contiguous()

    @property
    def description(self) -> str:
        """The operation in words; empty where the tensor is copied."""
        operation = "" if self.operation == "as it is" else self.operation
        cut = "" if self.rows is None else f"the first {self.rows} rows"
        made = "" if self.transform is None else self.transform.description
        return ", ".join(filter(None, (operation, cut, made)))


def from_source(tensor: str, transform: Transform | None = None) -> Derived:
    """A tensor of the one source of an edit."""
    return Derived((Part(SOURCE, tensor),), transform=transform)


def chosen_rows(rows: Sequence[int]) -> Transform:
    """Some rows in this order."""
    return Transform(lambda tensor: tensor[list(rows)], f"rows {', '.join(map(str, rows))}")


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
        for name, origin in self.derived.items() if not problems else ():
            tensors = {part: sources[part.source][part.tensor] for part in origin.parts}
            target = list(targets[name].shape)
            try:
                fits = list(origin.compute(tensors.__getitem__).shape) == target
            except RuntimeError:  # the operation refuses these shapes
                fits = False
            if not fits:
                shapes = " and ".join(str(list(tensors[part].shape)) for part in origin.parts)
                how = origin.description or origin.operation
                problems.append(f"{name} is to be {target} and cannot be made of {shapes} ({how})")
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

    def leave_out_unused(self, names: Iterable[str], reason: str) -> None:
        """Leave out the source's tensors that no tensor of the new model is made of."""
        used = {part for origin in self.derived.values() for part in origin.parts}
        self.left_out |= {part: reason for name in names if (part := Part(SOURCE, name)) not in used}


def targets(model: "BraidForCausalLM") -> dict[str, Tensor]:
    """Every tensor to account for; a tied head is the embedding."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied}


def parameters(model: "BraidForCausalLM") -> int:
    """How many numbers the tensors of a model hold."""
    return sum(tensor.numel() for tensor in targets(model).values())


def staying(before: int, after: int, what: str = "parameters") -> str:
    """`8,000 of 10,000 parameters stay (80.0%)`."""
    return f"{after:,} of {before:,} {what} stay ({after / before:.1%})"


def planned(config: BraidConfig, addresses: Mapping[str, str] | None = None) -> "tuple[BraidForCausalLM, Account]":
    """A new model without memory, and its account in which every tensor is copied, from the place it had."""
    model = skeleton(config)
    return model, moved(targets(model), addresses)


def moved(tensors: Iterable[str], addresses: Mapping[str, str] | None = None) -> Account:
    """An account in which every tensor is copied, from the place it had; `addresses` are the new ones by the old."""
    account = Account()
    for tensor in tensors:
        places = ((old, new) for old, new in (addresses or {}).items() if tensor.startswith(f"{new}."))
        before, now = next(places, ("", ""))
        account.origins[tensor] = from_source(before + tensor.removeprefix(now))
    return account


def account_summary(account: Account) -> list[str]:
    """How many tensors are copied, changed, fresh and left out: a line, and none for an empty account."""
    copied = Counter(not origin.description for origin in account.derived.values())
    counts = [f"{copied[True]} copied as they are"] if copied[True] else []
    counts += [f"{copied[False]} changed"] if copied[False] else []
    counts += [f"{count} fresh ({kind})" for kind, count in Counter(one.kind for one in account.fresh.values()).items()]
    counts += [f"{count} left out ({reason})" for reason, count in Counter(account.left_out.values()).items()]
    return [f"  tensors: {', '.join(counts)}"] if counts else []


def account_table(account: Account, paths: Sequence[str] = ()) -> list[str]:
    """The account as text: tensors of one kind in one line, numbers of layers as *. What changes comes first, then
    tensors that are left out, and copied ones last."""
    entries: list[tuple[str, str, tuple[Part, ...]]] = []
    for name, origin in account.origins.items():
        if isinstance(origin, Fresh):
            entries.append((f"{_pattern(origin.module, (), 'layers')}.*", origin.kind, ()))
        else:
            target = _pattern(name, paths, "layers", "stack", "experts")
            entries.append((target, origin.description, origin.parts))
    entries += [("-", f"left out: {reason}", (part,)) for part, reason in account.left_out.items()]
    times: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    sources: dict[Any, dict[str, dict[str, None]]] = {}  # by row, `model.embedding.weight` of stories and maths
    for target, how, parts in entries:
        read = {part: _pattern(part.tensor, (), "stages", "layers") for part in parts}
        row = target, how, tuple(dict.fromkeys(read.values()))
        times[row] += 1
        for part, tensor in read.items():
            sources.setdefault(row, {}).setdefault(tensor, {})[part.source] = None
    if not times:
        return []
    lines = [["times", "tensor", "from", "how"]]
    for row, count in sorted(times.items(), key=lambda line: (not line[0][1], line[0][0] == "-")):
        texts = (f"{', '.join(names)}: {tensor}" for tensor, names in sources.get(row, {}).items())
        lines.append([str(count), row[0], " + ".join(texts) or "fresh", row[1]])
    return columns(lines)


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
