"""Weight gradients of several banks of one shape by one launch: `kernels.gradient_stacks` for banks of experts."""

import torch
from torch import Tensor

from braidlm.kernels.gradient_stacks import GradientStack
from braidlm.kernels.routed.grouped_weights import Gathered, weight_gradients
from braidlm.kernels.routed.permutation import Permutation

ROWS = 212_992
"""Sorted rows, of all banks of a stack together, that fill a large GPU; more would only hold memory longer."""
Shape = tuple[int, int, int]


class GroupedGradientStack(GradientStack):
    """The inputs, and in the backward pass the gradients, of banks of one shape [experts, inputs, outputs].

    `gathered` of so many `tokens` are the inputs, or the gradients; by default neither.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        shape: Shape,
        dtype: torch.dtype,
        biased: bool,
        gathered: Gathered | None = None,
        tokens: int = 0,
    ):
        experts, inputs, outputs = shape
        self.shape, self.biased, self.gathered = shape, biased, gathered
        self.permutations: list[Permutation | None] = [None] * layers
        self.row_weights: list[Tensor | None] = [None] * layers
        size = experts * (inputs + biased) * outputs
        input_rows, gradient_rows = (tokens if gathered == what else rows for what in ("inputs", "gradients"))
        self._allocate(layers, (input_rows, inputs), (gradient_rows, outputs), (size,), dtype)

    def submit(
        self, index: int, permutation: Permutation | None = None, row_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of a bank's weight and bias."""
        assert self.gradients is not None
        assert self.results is not None
        self.pending -= 1
        self.permutations[index], self.row_weights[index] = permutation, row_weights
        if not self.pending:
            permutations = [p for p in self.permutations if p is not None]
            weights = [w for w in self.row_weights if w is not None]
            read = [x for p in permutations for x in (p.expert_offsets, p.source, p.row_of_choice, p.tile_expert)]
            with self.side.work(self.inputs, self.gradients, *read, *weights):
                weight_gradients(
                    self.inputs, self.gradients, permutations, self.gathered, self.biased, self.results,
                    row_weights=weights,
                )  # fmt: skip
        experts, inputs, outputs = self.shape
        result, matrices = self.results[index], experts * inputs * outputs
        bias = result[matrices:].view(experts, outputs).data if self.biased else None
        return result[:matrices].view(self.shape).data, bias
