"""Weight gradients of several banks of one shape by one launch: what `weight_stacks` is for plain layers.

Sorted rows and their gradients stand side by side from the moment they are made, and the last bank to deliver has the
gradients of all of them computed.
"""

import torch
from torch import Tensor

from braidlm.kernels.routed.grouped_weights import weight_gradients
from braidlm.kernels.routed.placement import Placement
from braidlm.kernels.side_stream import Aside

ROWS = 212_992
"""So many sorted rows, of all banks together, fill a large GPU; more would only hold memory longer."""


class GroupedStack:
    """The inputs, and in the backward pass the gradients, of banks of one shape [experts, inputs, outputs]."""

    def __init__(
        self,
        layers: int,
        rows: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        aside: Aside,
        biased: bool,
        tokens: int | None = None,
    ):
        """With `tokens`, the inputs are so many tokens, which the rows' sources pick from."""
        self.shape, self.aside, self.biased, self.waiting = shape, aside, biased, layers
        self.rows, self.gathers = rows, tokens is not None
        self.inputs = torch.empty(layers, tokens or rows, shape[1], dtype=dtype, device=aside.device)
        self.gradients: Tensor | None = None
        self.results: Tensor | None = None
        self.placements: list[Placement | None] = [None] * layers

    def places(self) -> list["GroupedPlace"]:
        return [GroupedPlace(self, index) for index in range(len(self.inputs))]

    def gradient(self, index: int) -> Tensor:
        if self.gradients is None:
            layers, (experts, inputs, outputs) = len(self.inputs), self.shape
            self.gradients = self.inputs.new_empty(layers, self.rows, outputs)
            size = experts * (inputs + self.biased) * outputs
            self.results = self.inputs.new_empty(layers, size, dtype=torch.float32)
        return self.gradients[index].data

    def delivered(self, index: int, placement: Placement) -> tuple[Tensor, Tensor | None]:
        assert self.gradients is not None
        assert self.results is not None
        self.waiting -= 1
        self.placements[index] = placement
        if not self.waiting:
            placements = [p for p in self.placements if p is not None]
            kept = [x for p in placements for x in (p.starts, p.source)]
            with self.aside.piece(self.inputs, self.gradients, *kept):
                weight_gradients(self.inputs, self.gradients, placements, self.gathers, self.biased, self.results)
        experts, inputs, outputs = self.shape
        mine, matrices = self.results[index], experts * inputs * outputs
        bias = mine[matrices:].view(experts, outputs).data if self.biased else None
        return mine[:matrices].view(self.shape).data, bias


class GroupedPlace:
    """One bank's place in a stack. Tensors are handed out as `.data`: to autograd they are no views of each other."""

    def __init__(self, stack: GroupedStack, index: int):
        self.stack, self.index = stack, index

    @property
    def input(self) -> Tensor:
        """[rows or tokens, in], to be written."""
        return self.stack.inputs[self.index].data

    @property
    def gradient(self) -> Tensor:
        """[rows, out], to be written."""
        return self.stack.gradient(self.index)

    def deliver(self, gradient: Tensor, placement: Placement) -> tuple[Tensor, Tensor | None]:
        """The gradients of weight and bias: complete when the other banks have delivered and all is joined."""
        place = self.gradient
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        return self.stack.delivered(self.index, placement)
