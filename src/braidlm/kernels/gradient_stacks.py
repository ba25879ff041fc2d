"""Weight gradients of several layers of one shape by one batched product.

A single layer's product has too few tiles for a large GPU. So such layers write their inputs and gradients into slots
of shared tensors, and the last layer to submit computes the weight gradients of all of them, in memory that the others
have already returned to autograd.
"""

import torch
from torch import Tensor

from braidlm.kernels.side_stream import current_side_stream

ROWS = 98304
"""Rows, of all layers of a stack together, that fill a large GPU; more would only hold memory longer."""


class GradientStack:
    """The inputs, and in the backward pass the gradients, of layers of one shape."""

    def __init__(self, layers: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False):
        """Weights are [out, in] = `shape`; with `transposed` their gradients are computed as [in, out]."""
        side = current_side_stream()
        assert side is not None
        (self.outputs, inputs), self.transposed, self.side, self.pending = shape, transposed, side, layers
        self.inputs = torch.empty(layers, rows, inputs, dtype=dtype, device=side.device)
        self.gradients: Tensor | None = None
        self.results: Tensor | None = None

    def slots(self) -> list["GradientSlot"]:
        return [GradientSlot(self, index) for index in range(len(self.inputs))]

    def gradient(self, index: int) -> Tensor:
        if self.gradients is None:
            layers, rows, inputs = self.inputs.shape
            self.gradients = self.inputs.new_empty(layers, rows, self.outputs)
            shape = (inputs, self.outputs) if self.transposed else (self.outputs, inputs)
            self.results = self.inputs.new_empty(layers, *shape, dtype=torch.float32)
        return self.gradients[index].data

    def submit(self, index: int) -> Tensor:
        assert self.gradients is not None
        assert self.results is not None
        self.pending -= 1
        if not self.pending:
            with self.side.work(self.gradients, self.inputs):
                left, right = (self.inputs, self.gradients) if self.transposed else (self.gradients, self.inputs)
                _batched_product(left.transpose(1, 2), right, self.results)
        return self.results[index].data


class GradientSlot:
    """One layer's slot in a stack. Tensors are returned as `.data`, so that autograd sees no views of each other."""

    def __init__(self, stack: GradientStack, index: int):
        self.stack, self.index = stack, index

    @property
    def input(self) -> Tensor:
        """[rows, in]: the kernel that computes the layer's input writes it here."""
        return self.stack.inputs[self.index].data

    @property
    def gradient(self) -> Tensor:
        """[rows, out]: the kernel that computes the gradient of the layer's output writes it here."""
        return self.stack.gradient(self.index)

    def submit(self, gradient: Tensor) -> Tensor:
        """The weight gradient [out, in], complete when all layers have submitted and the side stream is done."""
        slot = self.gradient
        if gradient.data_ptr() != slot.data_ptr():
            slot.copy_(gradient)
        return self.stack.submit(self.index)


def _batched_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.is_cuda and a.dtype != out.dtype:
        torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(torch.bmm(a, b))
