"""The contract of a bridge: how a checkpoint of a format is opened, and which of its tensors is which of ours.

One table of links serves both directions, so an import and an export cannot disagree.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from braidlm.bridges.checkpoint import Checkpoint, Shapes
from braidlm.bridges.locate import Found
from braidlm.bridges.plain import PlainModel
from braidlm.core.errors import BraidError
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.registry import Registry

bridges = Registry("format")


@dataclass(frozen=True)
class Link:
    """One tensor of ours and the tensor or tensors of the other format that hold the same numbers."""

    braid: str
    foreign: tuple[str, ...]
    """Where ours is a stack: those of its first member, then those of the second, and so on."""
    sizes: tuple[int, ...] = ()
    """Rows of each of several foreign tensors, which ours has one below the other in this order."""
    transposed: bool = False
    """Whether the foreign matrix is [in, out] (GPT-2's Conv1D) where ours is [out, in]."""
    rows: tuple[int, ...] | None = None
    """Which of our rows stands at each foreign row, where the order differs."""
    members: int | None = None
    """How many equal modules our tensor stacks: vectors as [member, size], matrices as [member, in, out]."""
    as_row: bool = False
    """Whether the foreign tensor is a matrix of one row where ours is a vector."""

    def to_foreign(self, tensor: Tensor) -> list[Tensor]:
        """Our tensor as the foreign ones."""
        # Copies, because safetensors refuses tensors that share memory.
        return [
            part.clone(memory_format=torch.contiguous_format)
            for member in self._apart(tensor)
            for part in self._member_to_foreign(member)
        ]

    def to_braid(self, parts: Sequence[Tensor]) -> Tensor:
        """The foreign tensors as ours, in float32."""
        each = len(parts) // (self.members or 1)
        members = [self._member_to_braid(parts[at : at + each]) for at in range(0, len(parts), each)]
        return members[0].contiguous() if self.members is None else torch.stack([_turned(m) for m in members])

    def _apart(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor] if self.members is None else [_turned(member) for member in tensor.unbind()]

    def _member_to_foreign(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor if self.rows is None else tensor[torch.tensor(self.rows, device=tensor.device)]
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        return [part.t() if self.transposed else part[None] if self.as_row else part for part in parts]

    def _member_to_braid(self, parts: Sequence[Tensor]) -> Tensor:
        parts = [(part.t() if self.transposed else part[0] if self.as_row else part).float() for part in parts]
        tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return tensor if self.rows is None else tensor[torch.tensor(self.rows).argsort()]

    def manner(self, outward: bool) -> str:
        """In a word what happens on the way."""
        each = len(self.foreign) // (self.members or 1)
        joined = "" if each == 1 else f"split in {each}" if outward else f"{each} stacked"
        reordered = "rows reordered" if self.rows is not None else ""
        repeated = "" if self.members is None else f"for each of {self.members} members"
        return ", ".join(filter(None, (joined, "transposed" if self.transposed else "", reordered, repeated)))


@dataclass
class Opened:
    """A checkpoint of a format, and the model of ours that it is to become."""

    checkpoint: Checkpoint
    config: BraidConfig
    subject: str
    """What the tensors must be those of, for the error if they are not."""
    notes: list[str] = field(default_factory=list)


class Bridge(ABC):
    """A format: how its checkpoints are opened, and the links of their tensors."""

    title: ClassVar[str]
    """As people write it."""
    in_one_file: ClassVar[bool] = False
    """Whether a checkpoint is a file of weights, with a configuration beside it, and not a folder."""

    @abstractmethod
    def open(self, found: Found) -> Opened:
        """Read what a checkpoint says it is, check that Braid can express it, and open its tensors."""

    @abstractmethod
    def links(self, plain: PlainModel) -> Iterator[Link]:
        """Which tensor is which, the head left out where it is tied."""

    def checked_links(self, plain: PlainModel) -> list[Link]:
        """The links of every tensor of ours; one without a link has no place in the format."""
        tensors = plain.tensors
        links = [link for link in self.links(plain) if link.braid in tensors]
        if homeless := sorted(set(tensors) - {link.braid for link in links}):
            raise BraidError(f"{self.title} has no place for these tensors: {listed(homeless)}")
        return links

    def foreign_shapes(self, plain: PlainModel, links: list[Link]) -> Shapes:
        """The shape of every foreign tensor, by making them of tensors without memory."""
        tensors = plain.tensors
        made = ((link.foreign, link.to_foreign(tensors[link.braid])) for link in links)
        return {n: tuple(p.shape) for names, parts in made for n, p in zip(names, parts, strict=True)}


def folder_formats() -> tuple[str, ...]:
    """The formats whose checkpoints are folders that say themselves what they are."""
    return tuple(name for name in bridges if not bridges[name].in_one_file)


def compare_shapes(expected: Shapes, found: Shapes) -> list[str]:
    """Every tensor that is missing, left over or of another shape."""
    missing = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    left_over = [f"left over {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    misshaped = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return missing + left_over + misshaped


def listed(items: Sequence[str], most: int = 20) -> str:
    """Lines of a list, cut where it would fill the screen."""
    rest = [f"and {len(items) - most} more"] if len(items) > most else []
    return "".join(f"\n  - {item}" for item in [*items[:most], *rest])


def _turned(member: Tensor) -> Tensor:
    """A matrix between [in, out], as stacks have it, and [out, in]; a vector as it is."""
    return member.t() if member.ndim == 2 else member
