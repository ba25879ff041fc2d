"""Weight gradients of several banks of one shape by one launch: `kernels.gradient_stacks` for banks of experts."""

from torch import Tensor

from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.routed.grouped.weights import Gathered, weight_gradients
from braidlm.kernels.routed.permutation import Permutation

ROWS = 212_992
"""Sorted rows, of all banks of a stack together, that fill a large GPU; more would only hold memory longer."""


class GroupedGradientStack(GradientStack):
    """The gradients of the weights [experts, in, out], and of their biases, of banks of one shape.

    `gathered` are the inputs, or the gradients, which then are those of tokens; by default neither.
    """

    def __init__(
        self,
        experts: int,
        inputs: StackedRows,
        gradients: StackedRows,
        biased: bool = False,
        gathered: Gathered | None = None,
    ):
        super().__init__(inputs, gradients)
        self.shape, self.biased, self.gathered = (experts, inputs.width, gradients.width), biased, gathered
        self.permutations: list[Permutation | None] = [None] * self.layers
        self.row_weights: list[Tensor | None] = [None] * self.layers

    @property
    def result_shape(self) -> tuple[int, ...]:
        experts, inputs, outputs = self.shape
        return (experts * (inputs + self.biased) * outputs,)

    def submit(
        self, index: int, permutation: Permutation | None = None, row_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of a bank's weight and bias."""
        results = self.results
        self.pending -= 1
        self.permutations[index], self.row_weights[index] = permutation, row_weights
        if not self.pending:
            permutations = [p for p in self.permutations if p is not None]
            weights = [w for w in self.row_weights if w is not None]
            read = [x for p in permutations for x in (p.expert_offsets, p.source, p.row_of_choice, p.tile_expert)]
            inputs, gradients = self.inputs.tensor, self.gradients.tensor
            with self.side.work(inputs, gradients, *read, *weights):
                weight_gradients(
                    inputs, gradients, permutations, self.gathered, self.biased, results, row_weights=weights
                )
            self.release()
        experts, width, outputs = self.shape
        result, matrices = results[index], experts * width * outputs
        bias = result[matrices:].view(experts, outputs).data if self.biased else None
        return result[:matrices].view(self.shape).data, bias
