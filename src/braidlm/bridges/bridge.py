"""The contract of a bridge: what a format can say, and which of its tensors is which of ours.

One table of links serves both directions, so an import and an export cannot disagree.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from braidlm.bridges.plain import PlainModel
from braidlm.core.errors import BraidError
from braidlm.model.registry import Registry

bridges = Registry("format")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Link:
    """One tensor of ours and the tensor or tensors of the other format that hold the same numbers."""

    braid: str
    foreign: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    """Rows of each of several foreign tensors, which ours stacks in this order."""
    transposed: bool = False
    """Whether the foreign matrix is [in, out] (GPT-2's Conv1D) where ours is [out, in]."""
    rows: tuple[int, ...] | None = None
    """Which of our rows stands at each foreign row, where the order differs."""

    def to_foreign(self, tensor: Tensor) -> list[Tensor]:
        """Our tensor as the foreign ones."""
        tensor = tensor if self.rows is None else tensor[torch.tensor(self.rows, device=tensor.device)]
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        # Copies, because safetensors refuses tensors that share memory.
        return [(part.t() if self.transposed else part).clone(memory_format=torch.contiguous_format) for part in parts]

    def to_braid(self, parts: Sequence[Tensor]) -> Tensor:
        """The foreign tensors as ours, in float32."""
        parts = [(part.t() if self.transposed else part).float() for part in parts]
        tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()
        return tensor if self.rows is None else tensor[torch.tensor(self.rows).argsort()]

    def manner(self, outward: bool) -> str:
        """In a word what happens on the way."""
        many = len(self.foreign)
        stacked = "" if many == 1 else f"split in {many}" if outward else f"{many} stacked"
        reordered = "rows reordered" if self.rows is not None else ""
        return ", ".join(filter(None, (stacked, "transposed" if self.transposed else "", reordered)))


class Bridge(ABC):
    """A format of Hugging Face's: its configuration to ours and back, and the links of the tensors."""

    title: ClassVar[str]
    """As people write it."""
    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]
    body: ClassVar[str]
    """The prefix of every tensor but the head's; a checkpoint saved without the head lacks it."""
    ignorable: ClassVar[dict[str, str]] = {}
    """Patterns of stored tensors that carry nothing learned, and what they are."""
    embedding: ClassVar[str]
    """The tensor that a tied head shares."""
    head: ClassVar[str] = "lm_head.weight"
    zero_biases: ClassVar[bool] = False
    """Whether the format always has biases: ours without them are then written as zeros."""

    @abstractmethod
    def import_problems(self, config: Any) -> list[str]:
        """What of a foreign configuration our model cannot express."""

    @abstractmethod
    def architecture(self, config: Any) -> dict[str, Any]:
        """Our architecture for a foreign configuration without problems."""

    @abstractmethod
    def export_problems(self, plain: PlainModel) -> list[str]:
        """What of our model the format cannot express."""

    @abstractmethod
    def settings(self, plain: PlainModel) -> dict[str, Any]:
        """The foreign configuration for a model of ours without problems."""

    @abstractmethod
    def links(self, plain: PlainModel) -> Iterator[Link]:
        """Which tensor is which, the head left out where it is tied."""

    def export_notes(self, plain: PlainModel) -> list[str]:
        """What is lost on the way without changing the function."""
        return []

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

    def why_ignorable(self, name: str) -> str | None:
        """What a stored tensor is that need not be read, or None if it must be."""
        return next((why for pattern, why in self.ignorable.items() if re.fullmatch(pattern, name)), None)


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
