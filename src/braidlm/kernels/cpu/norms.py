"""Root mean square norms on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.replacing import is_eager_cpu_training, replaces
from braidlm.model.norms import RMSNorm
from braidlm.model.routing.dispatch import Groups
from braidlm.model.routing.stacked import expand_vector


@replaces(RMSNorm, on=("cpu",))
class CpuRMSNorm(RMSNorm):
    """In training, with a gradient that is written by hand."""

    def forward(self, x: Tensor, groups: Groups | None = None) -> Tensor:
        x = x.to(self.weight.dtype)
        if groups is None and is_eager_cpu_training(x):
            return RMSNormFunction.apply(x, expand_vector(self.weight, x), self.eps)
        return super().forward(x, groups)


class RMSNormFunction(torch.autograd.Function):
    """`F.rms_norm(x, weight)`: torch's own gradient on a CPU costs six times a LayerNorm's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        weight_gradient = (upstream * normed).sum_to_size(weight.shape)
        gradient = (upstream * weight).sum_to_size(normed.shape)  # the members of a stack may share their input
        projection = (gradient * normed).mean(-1, keepdim=True)
        return gradient.addcmul_(normed, projection, value=-1).mul_(scale), weight_gradient, None
