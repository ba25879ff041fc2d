"""Positions of tokens: learned vectors, rotations of queries and keys, or none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Range
from ..config.registry import Choice, Registry
from ..config.strict import PartOf
from ..errors import BraidError
from .rope_scaling import RopeScaling, rope_scalings

position_kinds = Registry("positions", third_party=True)


class Rotation(Protocol):
    """Rotates queries and keys [batch, time, head, dim] by their positions."""

    def __call__(self, heads_BTNH: Tensor) -> Tensor: ...

    def at(self, index_BK: Tensor) -> "Rotation":
        """The rotation of some tokens of each row."""


class Positions(nn.Module):
    """The base class: positions are added to the embedding, or rotate queries and keys, or neither."""

    limit: int | None = None
    """Maximum length of a sequence, if there is one."""

    def check(self, head_dim: int) -> None:
        """Raise an error for a head size that is not supported, when a model is built."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotation(self, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        return None

    def moved_back(self, keys: Tensor, by: int) -> Tensor:
        """Keys [..., dim] as they would be `by` positions earlier, for a memory of the text before a chunk."""
        raise BraidError(
            "with these positions a chunk cannot attend to the text before it: they count from its own beginning",
            todo="Use positions 'rope' or 'none'.",
        )


@position_kinds.register("none")
class NoPositions(Positions):
    """No positions: the model knows the order of tokens through the causal mask alone."""

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, width: int, context: int):
        super().__init__()
        self.config = config

    def moved_back(self, keys: Tensor, by: int) -> Tensor:
        return keys


@position_kinds.register("learned")
class LearnedPositions(Positions):
    """A learned vector for each of `context` positions, added to the embedding (GPT-2)."""

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, width: int, context: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(context, width))
        self.limit = context

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + F.embedding(positions, self.weight)


@position_kinds.register("rope")
class RotaryPositions(Positions):
    """Rotary embedding: pairs of channels of queries and keys are rotated by the position."""

    @dataclass
    class Config:
        theta: Annotated[float, Range(above=0, at_most=1e12)] = 10000.0
        """Base of the wavelengths."""
        pairs: Literal["half", "interleaved"] = "half"
        """Which channels form a pair: i with i + dim/2 (Llama on Hugging Face) or 2i with 2i + 1 (PaPaformer)."""
        scaling: Annotated[Choice, PartOf(rope_scalings)] | None = None
        """How wavelengths are changed for longer texts; by default not at all."""

    def __init__(self, config: Config, width: int, context: int):
        super().__init__()
        self.config = config
        self.scaling: RopeScaling | None = None if config.scaling is None else rope_scalings.build(config.scaling)

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            raise BraidError(f"rotary positions need an even head size, got {head_dim}")
        self._frequencies(head_dim, torch.device("cpu"))  # a scaling may refuse its options

    def rotation(self, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = (table.to(dtype)[:, :, None] for table in self.tables(head_dim, positions))
        return PairRotation(cos, sin, self._swap)

    def moved_back(self, keys: Tensor, by: int) -> Tensor:
        cos, sin = self.tables(keys.shape[-1], torch.full((1, 1), -by, device=keys.device))
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor  # the keys have it already
        wide = keys.to(torch.promote_types(keys.dtype, cos.dtype))
        return (torch.addcmul(wide * cos, self._swap(wide), sin) / factor).to(keys.dtype)

    def tables(self, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine [batch or 1, time, dim]: x becomes x cos + (x swapped in pairs) sin."""
        # They are computed in each pass, in float32: the operations are tiny, and there is no buffer to save or move.
        angle_BTH = positions[..., None].float() * self._frequencies(head_dim, positions.device)
        if self.config.pairs == "half":
            angle_BTH = torch.cat((angle_BTH, angle_BTH), dim=-1)
        else:
            angle_BTH = angle_BTH.repeat_interleave(2, dim=-1)
        # A pair (a, b) becomes (a cos - b sin, b cos + a sin).
        channel = torch.arange(head_dim, device=positions.device)
        sign = torch.where(self._swap(channel) > channel, -1.0, 1.0)
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return angle_BTH.cos() * factor, angle_BTH.sin() * (sign * factor)

    def _frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        frequency_H = self.config.theta**-exponent
        return frequency_H if self.scaling is None else self.scaling.scale(frequency_H, self.config.theta)

    @property
    def _swap(self) -> Callable[[Tensor], Tensor]:
        return _swap_halves if self.config.pairs == "half" else _swap_neighbours


@dataclass(frozen=True, eq=False)  # compared as an object: torch.compile looks it up in sets before it has fields
class PairRotation:
    """Rotates pairs of channels: x becomes x cos + (x swapped in pairs) sin."""

    cos: Tensor
    """[batch or 1, time, 1, dim]."""
    sin: Tensor
    swap: Callable[[Tensor], Tensor]

    def __call__(self, heads_BTNH: Tensor) -> Tensor:
        if len(self.cos) == 1:
            return torch.addcmul(heads_BTNH * self.cos, self.swap(heads_BTNH), self.sin)
        grouped = heads_BTNH.unflatten(0, (-1, len(self.cos)))  # the members of a stack are concatenated in the batch
        return torch.addcmul(grouped * self.cos, self.swap(grouped), self.sin).flatten(0, 1)

    def at(self, index_BK: Tensor) -> "PairRotation":
        row = torch.arange(len(index_BK), device=index_BK.device)[:, None]
        cos, sin = (x.expand(len(index_BK), -1, -1, -1)[row, index_BK] for x in (self.cos, self.sin))
        return PairRotation(cos, sin, self.swap)


def _swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _swap_neighbours(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
