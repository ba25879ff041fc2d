"""Scaled rotary positions: lower frequencies, so that a model reads longer texts than it was first trained on.

As transformers defines them under `rope_parameters`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config.ranges import Length, Positive
from ..config.registry import Registry
from ..errors import BraidError

rope_scalings = Registry("rope scaling", third_party=True)


class RopeScaling:
    """The base class: from the frequencies of `theta` to those that are used."""

    attention_factor = 1.0
    """What rotated queries and keys are multiplied by."""

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
