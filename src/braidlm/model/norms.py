"""Normalisations of the stream."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .eager_cpu import RootMeanSquare, pays
from .registry import Registry

norms = Registry("norm", third_party=True)


@norms.register("layer")
class LayerNorm(nn.LayerNorm):
    """Mean and variance, with a learned scale and a bias if wanted (GPT-2)."""

    @dataclass
    class Config:
        eps: float = 1e-5
        """Added to the variance."""
        bias: bool = True
        """Whether a learned bias is added."""

    def __init__(self, config: Config, width: int):
        super().__init__(width, eps=config.eps, bias=config.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


@norms.register("rms")
class RMSNorm(nn.RMSNorm):
    """Root mean square, with a learned scale and no bias (Llama, PaPaformer)."""

    @dataclass
    class Config:
        eps: float = 1e-5
        """Added to the mean square."""

    def __init__(self, config: Config, width: int):
        super().__init__(width, eps=config.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)  # under autocast, as LayerNorm does: norms compute in float32
        return RootMeanSquare.apply(x, self.weight, self.eps) if pays(x) else super().forward(x)
