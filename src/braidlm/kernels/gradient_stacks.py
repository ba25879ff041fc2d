"""Weight gradients of several layers of one shape by one product.

A single layer's product has too few tiles for a large GPU. So such layers write their inputs and gradients into slots
of shared tensors, and the last layer to submit computes the weight gradients of all of them, in memory that the others
have already returned to autograd.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.side_stream import SideStream, current_side_stream

ROWS = 98304
"""Rows, of all layers of a stack together, that fill a large GPU; more would only hold memory longer."""


class StackedRows:
    """Rows of several layers, [layers, rows, width], in memory from the moment that the first of them is written.

    Two stacks have the same ones where their layers read the same rows, or where their outputs are added up.
    """

    def __init__(self, layers: int, rows: int, width: int, dtype: torch.dtype):
        self.layers, self.rows, self.width = layers, rows, width
        self.dtype, self.device = dtype, _side_stream().device

    @cached_property
    def tensor(self) -> Tensor:
        return torch.empty(self.layers, self.rows, self.width, dtype=self.dtype, device=self.device)


class GradientStack:
    """The gradients of the weights [out, in] of layers, from their `inputs` and the `gradients` of their outputs.

    With `transposed` they are computed as [in, out].
    """

    def __init__(self, inputs: StackedRows, gradients: StackedRows, transposed: bool = False):
        assert inputs.layers == gradients.layers
        self.inputs, self.gradients, self.transposed = inputs, gradients, transposed
        self.side, self.layers, self.pending = _side_stream(), inputs.layers, inputs.layers

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of one layer's result."""
        outputs, inputs = self.gradients.width, self.inputs.width
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    @cached_property
    def results(self) -> Tensor:
        return torch.empty(self.layers, *self.result_shape, dtype=torch.float32, device=self.side.device)

    def slots(self) -> list["GradientSlot"]:
        return [GradientSlot(self, index) for index in range(self.layers)]

    def submit(self, index: int) -> Any:
        """The result of a layer, complete when all layers have submitted and the side stream is done."""
        result = self.results[index].data
        self.pending -= 1
        if not self.pending:
            inputs, gradients = self.inputs.tensor, self.gradients.tensor
            with self.side.work(gradients, inputs):
                left, right = (inputs, gradients) if self.transposed else (gradients, inputs)
                _batched_product(left.transpose(1, 2), right, self.results)
            self.release()
        return result

    def release(self) -> None:
        """Give the rows back: autograd keeps a stack until the end of the pass."""
        del self.inputs, self.gradients


class GradientSlot:
    """One layer's slot in a stack. Tensors are returned as `.data`, so that autograd sees no views of each other."""

    def __init__(self, stack: GradientStack, index: int):
        self.stack, self.index = stack, index

    @property
    def input(self) -> Tensor:
        """[rows, in]: the kernel that computes the layer's input writes it here."""
        return self.stack.inputs.tensor[self.index].data

    @property
    def gradient(self) -> Tensor:
        """[rows, out]: the kernel that computes the gradient of the layer's output writes it here."""
        return self.stack.gradients.tensor[self.index].data

    def submit(self, gradient: Tensor, *arguments: Any) -> Any:
        """What the stack returns for a gradient that is complete."""
        slot = self.gradient
        if gradient.data_ptr() != slot.data_ptr():
            slot.copy_(gradient)
        return self.stack.submit(self.index, *arguments)


def _side_stream() -> SideStream:
    side = current_side_stream()
    assert side is not None
    return side


def _batched_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.is_cuda and a.dtype != out.dtype:
        torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(torch.bmm(a, b))
