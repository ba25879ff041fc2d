"""Weight gradients of several banks of one shape by one launch: `kernels.gradient_stacks` for banks of experts."""

import torch
from torch import Tensor

from braidlm.kernels.routed.grouped_weights import weight_gradients
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import current_side_stream

ROWS = 212_992
"""Sorted rows, of all banks of a stack together, that fill a large GPU; more would only hold memory longer."""


class GroupedGradientStack:
    """The inputs, and in the backward pass the gradients, of banks of one shape [experts, inputs, outputs]."""

    def __init__(
        self,
        layers: int,
        rows: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        biased: bool,
        tokens: int | None = None,
    ):
        """With `tokens`, the inputs are so many tokens, from which the rows are gathered by their sources."""
        side = current_side_stream()
        assert side is not None
        self.shape, self.side, self.biased, self.pending = shape, side, biased, layers
        self.rows, self.gathers = rows, tokens is not None
        self.inputs = torch.empty(layers, tokens or rows, shape[1], dtype=dtype, device=side.device)
        self.gradients: Tensor | None = None
        self.results: Tensor | None = None
        self.permutations: list[Permutation | None] = [None] * layers

    def slots(self) -> list["GroupedGradientSlot"]:
        return [GroupedGradientSlot(self, index) for index in range(len(self.inputs))]

    def gradient(self, index: int) -> Tensor:
        if self.gradients is None:
            layers, (experts, inputs, outputs) = len(self.inputs), self.shape
            self.gradients = self.inputs.new_empty(layers, self.rows, outputs)
            size = experts * (inputs + self.biased) * outputs
            self.results = self.inputs.new_empty(layers, size, dtype=torch.float32)
        return self.gradients[index].data

    def submit(self, index: int, permutation: Permutation) -> tuple[Tensor, Tensor | None]:
        assert self.gradients is not None
        assert self.results is not None
        self.pending -= 1
        self.permutations[index] = permutation
        if not self.pending:
            permutations = [p for p in self.permutations if p is not None]
            kept = [x for p in permutations for x in (p.expert_offsets, p.source)]
            with self.side.work(self.inputs, self.gradients, *kept):
                weight_gradients(self.inputs, self.gradients, permutations, self.gathers, self.biased, self.results)
        experts, inputs, outputs = self.shape
        result, matrices = self.results[index], experts * inputs * outputs
        bias = result[matrices:].view(experts, outputs).data if self.biased else None
        return result[:matrices].view(self.shape).data, bias


class GroupedGradientSlot:
    """One bank's slot in a stack. Tensors are returned as `.data`, so that autograd sees no views of each other."""

    def __init__(self, stack: GroupedGradientStack, index: int):
        self.stack, self.index = stack, index

    @property
    def input(self) -> Tensor:
        """[rows or tokens, in]: the kernel that computes the bank's input writes it here."""
        return self.stack.inputs[self.index].data

    @property
    def gradient(self) -> Tensor:
        """[rows, out]: the kernel that computes the gradient of the bank's output writes it here."""
        return self.stack.gradient(self.index)

    def submit(self, gradient: Tensor, permutation: Permutation) -> tuple[Tensor, Tensor | None]:
        """The gradients of weight and bias, complete when all banks have submitted and the side stream is done."""
        slot = self.gradient
        if gradient.data_ptr() != slot.data_ptr():
            slot.copy_(gradient)
        return self.stack.submit(self.index, permutation)
