"""Positions of tokens: learned vectors, rotations of queries and keys, or none."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Length, Positive, Range
from ..config.registry import Choice, NoOptions, Registry
from ..config.strict import PartOf
from ..errors import BraidError
from ..exporting import is_exporting

rope_scalings = Registry("rope scaling", third_party=True)


class RopeScaling:
    """The base class: from the frequencies of `theta` to those that are used."""

    attention_factor = 1.0  # what rotated queries and keys are multiplied by

    def __init__(self, config: Any):
        self.config = config

    def scale(self, frequency_H: Tensor, theta: float) -> Tensor:
        """The frequencies [dim / 2] of the pairs of a head."""
        raise NotImplementedError


@rope_scalings.register("linear")
class LinearScaling(RopeScaling):
    """Every wavelength is multiplied by `factor`, as if positions were closer together."""

    @dataclass
    class Config:
        factor: Positive
        """How many times longer the texts may be."""

    def scale(self, frequency_H: Tensor, theta: float) -> Tensor:
        return frequency_H / self.config.factor


@rope_scalings.register("llama3")
class Llama3Scaling(RopeScaling):
    """Long wavelengths are multiplied by `factor`, short ones are kept, with a smooth passage between (Llama 3.1)."""

    @dataclass
    class Config:
        factor: Positive
        """How many times longer the texts may be."""
        original_context: Length
        """Context length that the model was first trained with."""
        low_freq_factor: Positive = 1.0
        """Wavelengths above `original_context` / `low_freq_factor` are multiplied."""
        high_freq_factor: Positive = 4.0
        """Wavelengths below `original_context` / `high_freq_factor` are kept."""

        def __post_init__(self) -> None:
            if self.low_freq_factor >= self.high_freq_factor:
                raise BraidError(
                    f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})"
                )

    def scale(self, frequency_H: Tensor, theta: float) -> Tensor:
        low, high = self.config.low_freq_factor, self.config.high_freq_factor
        turns_H = self.config.original_context * frequency_H / (2 * math.pi)
        kept_H = ((turns_H - low) / (high - low)).clamp(0, 1)
        return frequency_H * (kept_H + (1 - kept_H) / self.config.factor)


@rope_scalings.register("yarn")
class YarnScaling(RopeScaling):
    """Pairs that turn often within the first context are kept, those that turn seldom slowed (YaRN)."""

    @dataclass
    class Config:
        factor: Positive
        """How many times longer the texts may be."""
        original_context: Length
        """Context length that the model was first trained with."""
        beta_fast: Positive = 32.0
        """Pairs with more turns within `original_context` are kept."""
        beta_slow: Positive = 1.0
        """Pairs with fewer turns within `original_context` are slowed by `factor`."""
        truncate: bool = True
        """Whether the borders between the pairs are rounded to whole pairs."""
        attention_factor: Positive | None = None
        """What rotated queries and keys are multiplied by; by default 0.1 ln(factor) + 1."""

        def __post_init__(self) -> None:
            if self.beta_slow >= self.beta_fast:
                raise BraidError(f"beta_slow ({self.beta_slow}) must be below beta_fast ({self.beta_fast})")

    def __init__(self, config: Config):
        super().__init__(config)
        self.attention_factor = config.attention_factor or 0.1 * math.log(max(config.factor, 1.0)) + 1.0

    def scale(self, frequency_H: Tensor, theta: float) -> Tensor:
        if theta <= 1:
            raise BraidError(f"yarn needs a theta above 1, got {theta}")
        pairs = len(frequency_H)
        first, last = (self._pair(turns, theta, pairs) for turns in (self.config.beta_fast, self.config.beta_slow))
        if self.config.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        pair_H = torch.arange(pairs, dtype=torch.float32, device=frequency_H.device)
        slowed_H = ((pair_H - first) / (last - first if last != first else 0.001)).clamp(0, 1)
        return frequency_H * (1 - slowed_H + slowed_H / self.config.factor)

    def _pair(self, turns: float, theta: float, pairs: int) -> float:
        """The pair, as a real number, that turns so many times within the first context."""
        return pairs * math.log(self.config.original_context / (turns * 2 * math.pi)) / math.log(theta)


position_kinds = Registry("positions", third_party=True)


@dataclass(frozen=True, eq=False)  # compared as an object: torch.compile looks it up in sets before it has fields
class Rotation:
    """Rotates queries and keys [batch, time, head, dim]: x becomes x cos + (x swapped in pairs of channels) sin."""

    cos: Tensor  # [batch or 1, time, 1, dim]
    sin: Tensor
    swap: Callable[[Tensor], Tensor]

    def __call__(self, heads_BTNH: Tensor) -> Tensor:
        rows = self.cos.shape[0]
        if not is_exporting() and rows == 1:
            return torch.addcmul(heads_BTNH * self.cos, self.swap(heads_BTNH), self.sin)
        grouped = heads_BTNH.unflatten(0, (-1, rows))  # the members of a stack are concatenated in the batch
        return torch.addcmul(grouped * self.cos, self.swap(grouped), self.sin).flatten(0, 1)

    def beginning(self, time: int) -> "Rotation":
        """The rotation of the first tokens."""
        return Rotation(self.cos[:, :time], self.sin[:, :time], self.swap)

    def at(self, index_BK: Tensor) -> "Rotation":
        """The rotation of some tokens of each row."""
        row = torch.arange(len(index_BK), device=index_BK.device)[:, None]
        cos, sin = (x.expand(len(index_BK), -1, -1, -1)[row, index_BK] for x in (self.cos, self.sin))
        return Rotation(cos, sin, self.swap)


class Positions(nn.Module):
    """The base class: positions are added to the embedding, or rotate queries and keys, or neither."""

    Config: Any = NoOptions
    limit: int | None = None  # maximum length of a sequence, if there is one

    def __init__(self, config: Any, width: int, context: int):
        super().__init__()
        self.config = config

    def check(self, head_dim: int) -> None:
        """Raise an error for a head size that is not supported, when a model is built."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotation(self, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        return None

    def moved_back(self, keys: Tensor, by: int) -> Tensor:
        """Keys [..., dim] as they would be `by` positions earlier, for a memory of the text before a chunk."""
        what = "with these positions a chunk cannot attend to the text before it: they count from its own beginning"
        raise BraidError(what, todo="Use positions 'rope' or 'none'.")


@position_kinds.register("none")
class NoPositions(Positions):
    """No positions: the model knows the order of tokens through the causal mask alone."""

    def moved_back(self, keys: Tensor, by: int) -> Tensor:
        return keys


@position_kinds.register("learned")
class LearnedPositions(Positions):
    """A learned vector for each of `context` positions, added to the embedding (GPT-2)."""

    def __init__(self, config: NoOptions, width: int, context: int):
        super().__init__(config, width, context)
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
        super().__init__(config, width, context)
        self._swap = _swap_halves if config.pairs == "half" else _swap_neighbours
        self.scaling: RopeScaling | None = None if config.scaling is None else rope_scalings.build(config.scaling)

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            raise BraidError(f"rotary positions need an even head size, got {head_dim}")
        self._frequencies(head_dim, torch.device("cpu"))  # a scaling may refuse its options

    def rotation(self, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = (table.to(dtype)[:, :, None] for table in self.tables(head_dim, positions))
        return Rotation(cos, sin, self._swap)

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


def _swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _swap_neighbours(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
