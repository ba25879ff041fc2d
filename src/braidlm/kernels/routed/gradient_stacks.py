"""Weight gradients of several banks of one shape by one launch: `kernels.gradient_stacks` for banks of experts."""

import torch
from torch import Tensor

from braidlm.kernels.gradient_stacks import GradientStack
from braidlm.kernels.routed.grouped_weights import weight_gradients
from braidlm.kernels.routed.permutation import Permutation

ROWS = 212_992
"""Sorted rows, of all banks of a stack together, that fill a large GPU; more would only hold memory longer."""
Shape = tuple[int, int, int]


class GroupedGradientStack(GradientStack):
    """The inputs, and in the backward pass the gradients, of banks of one shape [experts, inputs, outputs].

    With `tokens`, the inputs are so many tokens, from which the rows are gathered by their sources.
    """

    def __init__(
        self, layers: int, rows: int, shape: Shape, dtype: torch.dtype, biased: bool, tokens: int | None = None
    ):
        experts, inputs, outputs = shape
        self.shape, self.biased, self.gathers = shape, biased, tokens is not None
        self.permutations: list[Permutation | None] = [None] * layers
        size = experts * (inputs + biased) * outputs
        self._allocate(layers, (tokens or rows, inputs), (rows, outputs), (size,), dtype)

    def submit(self, index: int, permutation: Permutation | None = None) -> tuple[Tensor, Tensor | None]:
        """The gradients of a bank's weight and bias."""
        assert self.gradients is not None
        assert self.results is not None
        self.pending -= 1
        self.permutations[index] = permutation
        if not self.pending:
            permutations = [p for p in self.permutations if p is not None]
            read = [x for p in permutations for x in (p.expert_offsets, p.source)]
            with self.side.work(self.inputs, self.gradients, *read):
                weight_gradients(self.inputs, self.gradients, permutations, self.gathers, self.biased, self.results)
        experts, inputs, outputs = self.shape
        result, matrices = self.results[index], experts * inputs * outputs
        bias = result[matrices:].view(experts, outputs).data if self.biased else None
        return result[:matrices].view(self.shape).data, bias
