"""Weight gradients of several layers of one shape by one product.

A single layer's product has too few tiles for a large GPU. So such layers write their inputs and gradients into slots
of shared tensors, and the last layer to submit computes the weight gradients of all of them, in memory that the others
have already returned to autograd.
"""

from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.side_stream import current_side_stream

ROWS = 98304
"""Rows, of all layers of a stack together, that fill a large GPU; more would only hold memory longer."""


class GradientStack:
    """The inputs, and in the backward pass the gradients, of layers with weights [out, in] = `shape`.

    With `transposed` the gradients of the weights are computed as [in, out].
    """

    def __init__(self, layers: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False):
        outputs, inputs = shape
        self.transposed = transposed
        self._allocate(layers, (rows, inputs), (rows, outputs), (inputs, outputs) if transposed else shape, dtype)

    def _allocate(self, layers: int, inputs: Any, gradients: Any, results: Any, dtype: torch.dtype) -> None:
        """Inputs at once; gradients and results, of these shapes for each layer, when the backward pass begins."""
        side = current_side_stream()
        assert side is not None
        self.side, self.pending, self.shapes = side, layers, (gradients, results)
        self.inputs = torch.empty(layers, *inputs, dtype=dtype, device=side.device)
        self.gradients: Tensor | None = None
        self.results: Tensor | None = None

    def slots(self) -> list["GradientSlot"]:
        return [GradientSlot(self, index) for index in range(len(self.inputs))]

    def gradient(self, index: int) -> Tensor:
        if self.gradients is None:
            layers, (gradients, results) = len(self.inputs), self.shapes
            self.gradients = self.inputs.new_empty(layers, *gradients)
            self.results = self.inputs.new_empty(layers, *results, dtype=torch.float32)
        return self.gradients[index].data

    def submit(self, index: int) -> Any:
        """The result of a layer, complete when all layers have submitted and the side stream is done."""
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

    def submit(self, gradient: Tensor, *arguments: Any) -> Any:
        """What the stack returns for a gradient that is complete."""
        slot = self.gradient
        if gradient.data_ptr() != slot.data_ptr():
            slot.copy_(gradient)
        return self.stack.submit(self.index, *arguments)


def _batched_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.is_cuda and a.dtype != out.dtype:
        torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(torch.bmm(a, b))
