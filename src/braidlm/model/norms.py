"""Normalisations of the stream."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config.ranges import Epsilon
from .config.registry import Registry
from .routing.dispatch import Groups
from .routing.stacked import expand_vector, vector

norms = Registry("norm", third_party=True)


@norms.register("layer")
class LayerNorm(nn.LayerNorm):
    """Mean and variance, with a learned scale and optionally a bias (GPT-2)."""

    stackable = True

    @dataclass
    class Config:
        eps: Epsilon = 1e-5
        """Added to the variance."""
        bias: bool = True
        """Whether a learned bias is added."""

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__(width, eps=config.eps, bias=config.bias)
        self.config, self.stack = config, stack
        if stack is not None:
            self.weight = vector(stack, width)
            self.bias = vector(stack, width) if config.bias else None  # type: ignore[assignment]

    def forward(self, input: Tensor, groups: Groups | None = None) -> Tensor:
        if self.stack is None:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        normed = F.layer_norm(input, self.normalized_shape, eps=self.eps)
        weight = expand_vector(self.weight, input, groups)
        if self.bias is None:
            return normed * weight
        return torch.addcmul(expand_vector(self.bias, input, groups), normed, weight)


@norms.register("rms")
class RMSNorm(nn.RMSNorm):
    """Root mean square, with a learned scale and no bias (Llama, PaPaformer)."""

    stackable = True

    @dataclass
    class Config:
        eps: Epsilon = 1e-5
        """Added to the mean square."""

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__(width, eps=config.eps)
        self.config, self.stack = config, stack
        if stack is not None:
            self.weight = vector(stack, width)

    def forward(self, x: Tensor, groups: Groups | None = None) -> Tensor:
        x = x.to(self.weight.dtype)  # norms compute in float32 under autocast, as LayerNorm does
        if self.stack is None:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, eps=self.eps) * expand_vector(self.weight, x, groups)
