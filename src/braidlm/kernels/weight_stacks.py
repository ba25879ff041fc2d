"""Weight gradients of several layers of one shape by one batched product.

A single layer's product has too few tiles for a large GPU. So inputs and gradients of such layers stand side by side
from the moment they are made, and the last layer to deliver has the gradients of all of them computed, in the memory
that the others have already given to autograd.
"""

import torch
from torch import Tensor

from braidlm.kernels.side_stream import Aside

ROWS = 98304
"""So many rows, of all layers together, fill a large GPU; more would only hold memory longer."""


class Stack:
    """The inputs, and in the backward pass the gradients, of layers of one shape."""

    def __init__(
        self, layers: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, aside: Aside, turned: bool = False
    ):
        """Weights are [out, in] = `shape`, or, `turned`, their gradients are wanted as [in, out]."""
        (self.outputs, inputs), self.turned, self.aside, self.waiting = shape, turned, aside, layers
        self.inputs = torch.empty(layers, rows, inputs, dtype=dtype, device=aside.device)
        self.gradients: Tensor | None = None
        self.results: Tensor | None = None

    def places(self) -> list["Place"]:
        return [Place(self, index) for index in range(len(self.inputs))]

    def gradient(self, index: int) -> Tensor:
        if self.gradients is None:
            layers, rows, inputs = self.inputs.shape
            self.gradients = self.inputs.new_empty(layers, rows, self.outputs)
            shape = (inputs, self.outputs) if self.turned else (self.outputs, inputs)
            self.results = self.inputs.new_empty(layers, *shape, dtype=torch.float32)
        return self.gradients[index].data

    def delivered(self, index: int) -> Tensor:
        assert self.gradients is not None
        assert self.results is not None
        self.waiting -= 1
        if not self.waiting:
            with self.aside.piece(self.gradients, self.inputs):
                left, right = (self.inputs, self.gradients) if self.turned else (self.gradients, self.inputs)
                _batched_product(left.transpose(1, 2), right, self.results)
        return self.results[index].data


class Place:
    """One layer's place in a stack. Tensors are handed out as `.data`: to autograd they are no views of each other."""

    def __init__(self, stack: Stack, index: int):
        self.stack, self.index = stack, index

    @property
    def input(self) -> Tensor:
        """[rows, in], to be written."""
        return self.stack.inputs[self.index].data

    @property
    def gradient(self) -> Tensor:
        """[rows, out], to be written."""
        return self.stack.gradient(self.index)

    def deliver(self, gradient: Tensor) -> Tensor:
        """The gradient [out, in] of the weight: complete when the other layers have delivered and all is joined."""
        place = self.gradient
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        return self.stack.delivered(self.index)


def _batched_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.is_cuda and a.dtype != out.dtype:
        torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(torch.bmm(a, b))
