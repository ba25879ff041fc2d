"""Normalisations of the stream."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        # torch has one kernel for this on a GPU and none on a CPU, where its ten small operations cost six times a
        # LayerNorm; compiled, they fuse by themselves.
        if x.is_cuda or torch.compiler.is_compiling() or x.dtype != self.weight.dtype:
            return super().forward(x)
        return RootMeanSquare.apply(x, self.weight, self.eps)


class RootMeanSquare(torch.autograd.Function):
    """RMSNorm with few passes over memory; the reference is `torch.nn.functional.rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        weight_gradient = (upstream * normed).flatten(0, -2).sum(0)
        gradient = upstream * weight
        along = (gradient * normed).mean(-1, keepdim=True)
        return gradient.addcmul_(normed, along, value=-1).mul_(scale), weight_gradient, None
