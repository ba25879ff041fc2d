"""Stacks of linear layers on rows that are sorted by member, on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.replacing import is_eager_cpu, replaces
from braidlm.model.routing.dispatch import Groups
from braidlm.model.routing.stacked import StackedLinear


@replaces(StackedLinear, on=("cpu",))
class CpuStackedLinear(StackedLinear):
    """Every member writes into its slice of one output."""

    def grouped(self, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        if is_eager_cpu(rows) and not torch.is_autocast_enabled("cpu"):
            return GroupedLinearFunction.apply(rows, weight, bias, groups.counts_E.tolist())  # type: ignore[no-any-return]
        return super().grouped(rows, weight, bias, groups)


class GroupedLinearFunction(torch.autograd.Function):
    """Multiply rows sorted by expert by their expert's matrix; every expert writes into its slice of one output."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight_EIO)
        ctx.counts = counts
        outputs = rows.new_empty(len(rows), weight_EIO.shape[2])
        for expert, (own_rows, out) in enumerate(zip(rows.split(counts), outputs.split(counts), strict=True)):
            if bias_EO is None:
                torch.mm(own_rows, weight_EIO[expert], out=out)
            else:
                torch.addmm(bias_EO[expert], own_rows, weight_EIO[expert], out=out)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight_EIO = ctx.saved_tensors
        upstreams = upstream.split(ctx.counts)
        rows_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = torch.empty_like(rows)
            for own_upstream, weight, out in zip(upstreams, weight_EIO, rows_gradient.split(ctx.counts), strict=True):
                torch.mm(own_upstream, weight.T, out=out)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EIO, memory_format=torch.contiguous_format)
            for own_upstream, own_rows, out in zip(upstreams, rows.split(ctx.counts), weight_gradient, strict=True):
                torch.mm(own_rows.T, own_upstream, out=out)
        if ctx.needs_input_grad[2]:
            bias_gradient = torch.stack([own_upstream.sum(0) for own_upstream in upstreams])
        return rows_gradient, weight_gradient, bias_gradient, None
