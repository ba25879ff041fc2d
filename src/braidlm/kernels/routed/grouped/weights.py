"""Gradients of the matrices of experts, and of their biases: sums over sorted rows, of one layer or of a stack of them.

These sums are long, and limited by how often rows are read again: the larger the blocks, the less. Widths of small
models are often three times a power of two, which no block is; so a program may hold up to three adjacent blocks, which
share what they read of the wider side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.ops.launch import FLOAT32_BLOCKS, Blocks, fit_blocks, multiprocessors
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.grouped.products import LARGE
from braidlm.kernels.routed.grouped.sums import row_sums, stacked, sum_splits, weighted_sums
from braidlm.kernels.routed.permutation import Permutation

PROGRAMS_PER_SM, MIN_STEPS = 1, 4
"""Programs that fill the device, and blocks of rows that a program should sum at least."""
STACKED_ROWS = 212_992
"""Sorted rows, of all banks of a stack together, that fill a large GPU; more would only hold memory longer."""
Gathered = Literal["inputs", "gradients"]
"""What of a product is gathered from tokens."""


@dataclass(frozen=True)
class WeightLayout:
    """The part of a weight gradient that a program computes: `parts` adjacent blocks, whose `inner` counts sorted rows.

    The rows of blocks are inputs of the layer, or, `transposed`, outputs.
    """

    blocks: Blocks
    parts: int = 1
    transposed: bool = False


@triton.jit
def _grouped_weights(  # type: ignore[no-untyped-def]
    rows, gradient, out, source, expert_offsets, size, experts, products, input_rows, gradient_rows, sorted_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows^T @ gradient over a split of an expert's rows.

    Each layer has `input_rows` rows and `gradient_rows` gradients, of which those that are GATHERED are of tokens, and
    `sorted_rows` sources. Each split of an expert of a layer has `products` programs.
    """
    program = tl.program_id(0)
    group, program = program // products, program % products
    group, split = group // SPLITS, group % SPLITS
    layer, expert = (group // experts).to(tl.int64), group % experts
    rows += layer * input_rows * INPUTS
    gradient += layer * gradient_rows * OUTPUTS
    source += layer * sorted_rows
    expert_offsets += layer * (experts + 1)
    out += (layer * SPLITS + split) * size
    first = tl.load(expert_offsets + expert)
    steps = (tl.load(expert_offsets + expert + 1) - first) // BLOCK_K
    begin = first + steps * split // SPLITS * BLOCK_K
    end = first + steps * (split + 1) // SPLITS * BLOCK_K
    at = tl.arange(0, BLOCK_K)

    LEFT: tl.constexpr = OUTPUTS if TRANSPOSED else INPUTS
    RIGHT: tl.constexpr = INPUTS if TRANSPOSED else OUTPUTS
    EVEN: tl.constexpr = (LEFT % (BLOCK_M * PARTS) == 0) and (RIGHT % BLOCK_N == 0)
    programs = tl.cdiv(RIGHT, BLOCK_N)
    m = program // programs * BLOCK_M * PARTS + tl.arange(0, BLOCK_M)
    n = program % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        left = gradient + begin.to(tl.int64) * LEFT + at[:, None] * LEFT + m[None, :]
        right = rows + begin.to(tl.int64) * RIGHT + at[:, None] * RIGHT + n[None, :]
    else:
        left = rows + begin.to(tl.int64) * LEFT + at[:, None] * LEFT + m[None, :]
        right = gradient + begin.to(tl.int64) * RIGHT + at[:, None] * RIGHT + n[None, :]
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    three = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in range(begin, end, BLOCK_K):
        if GATHERED is not None:
            token = tl.maximum(tl.load(source + row + at), 0).to(tl.int64)[:, None]  # padding of the other side is zero
            if (GATHERED == "inputs") == TRANSPOSED:
                right = (rows if TRANSPOSED else gradient) + token * RIGHT + n[None, :]
            else:
                left = (gradient if TRANSPOSED else rows) + token * LEFT + m[None, :]
        b = _load_block(right, n, RIGHT, EVEN)
        one = tl.dot(tl.trans(_load_block(left, m, LEFT, EVEN)), b, one, input_precision="ieee")
        if PARTS > 1:
            a = _load_block(left + BLOCK_M, m + BLOCK_M, LEFT, EVEN)
            two = tl.dot(tl.trans(a), b, two, input_precision="ieee")
        if PARTS > 2:
            a = _load_block(left + 2 * BLOCK_M, m + 2 * BLOCK_M, LEFT, EVEN)
            three = tl.dot(tl.trans(a), b, three, input_precision="ieee")
        left += BLOCK_K * LEFT
        right += BLOCK_K * RIGHT
    out += expert.to(tl.int64) * INPUTS * OUTPUTS
    _store_block(out, one, m, n, LEFT, RIGHT, TRANSPOSED)
    if PARTS > 1:
        _store_block(out, two, m + BLOCK_M, n, LEFT, RIGHT, TRANSPOSED)
    if PARTS > 2:
        _store_block(out, three, m + 2 * BLOCK_M, n, LEFT, RIGHT, TRANSPOSED)


@triton.jit
def _load_block(offsets, column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:
        return tl.load(offsets)
    return tl.load(offsets, mask=(column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _store_block(out, block, m, n, LEFT: tl.constexpr, RIGHT: tl.constexpr, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    if TRANSPOSED:
        tl.store(out + n[:, None] * LEFT + m[None, :], tl.trans(block), mask=(n < RIGHT)[:, None] & (m < LEFT)[None, :])
    else:
        tl.store(out + m[:, None] * RIGHT + n[None, :], block, mask=(m < LEFT)[:, None] & (n < RIGHT)[None, :])


def grouped_weight_gradient(
    rows: Tensor,
    gradient: Tensor,
    permutation: Permutation,
    gathered: Gathered | None = None,
    bias: bool = False,
    layout: WeightLayout | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a weight, float32 [E, in, out], and, if there is a bias, its gradient [E, out].

    The rows [R, in] or the gradient [R, out] may be those of tokens [N, ...] that are gathered. Where it is the
    gradient, rows are already multiplied by their weights; the bias's gradient needs these too: `row_weights` [R].
    """
    experts, inputs, outputs = permutation.experts, rows.shape[1], gradient.shape[1]
    matrices = experts * inputs * outputs
    total = torch.empty(1, matrices + experts * outputs if bias else matrices, dtype=torch.float32, device=rows.device)
    weight_gradients(
        rows.contiguous()[None], gradient.contiguous()[None], [permutation], gathered, bias, total, layout,
        () if row_weights is None else [row_weights],
    )  # fmt: skip
    # As `.data`, so that autograd does not see views of each other.
    weight_gradient = total[0, :matrices].view(experts, inputs, outputs).data
    return weight_gradient, total[0, matrices:].view(experts, outputs).data if bias else None


def weight_gradients(
    rows: Tensor,
    gradients: Tensor,
    permutations: list[Permutation],
    gathered: Gathered | None,
    bias: bool,
    results: Tensor,
    layout: WeightLayout | None = None,
    row_weights: Sequence[Tensor] = (),
) -> None:
    """The gradients for several layers, [L, ...], into float32 [L, E * in * out], followed by [E * out] if `bias`.

    A matrix has few blocks and its sums are long, so an expert's rows may be split among several programs.
    """
    first, (layers, input_rows, inputs), (_, gradient_rows, outputs) = permutations[0], rows.shape, gradients.shape
    experts, size, matrices = first.experts, results.shape[1], first.experts * inputs * outputs
    tokens = len(first.row_of_choice)
    assert input_rows == (tokens if gathered == "inputs" else first.rows)
    assert gradient_rows == (tokens if gathered == "gradients" else first.rows)
    layout = layout or _default_layout(inputs, outputs, rows.dtype, gathered, layers)
    left, right = (outputs, inputs) if layout.transposed else (inputs, outputs)
    m, n, k = fit_blocks(layout.blocks, left, right, first.tile)
    products = triton.cdiv(left, m * layout.parts) * triton.cdiv(right, n)
    splits = _splits(products * experts * layers, first.rows // (experts * k), rows.device)
    expert_offsets, source = stacked(p.expert_offsets for p in permutations), stacked(p.source for p in permutations)
    if bias and gathered == "gradients":
        weighted_sums(gradients, stacked(row_weights), permutations, results[:, matrices:])
    elif bias:
        row_sums(gradients, expert_offsets, first, results[:, matrices:])
    parts = results if splits == 1 else results.new_empty(layers * splits, matrices)
    _grouped_weights[(layers * experts * splits * products,)](
        rows, gradients, parts, source, expert_offsets, size if splits == 1 else matrices, experts, products,
        input_rows, gradient_rows, first.rows, inputs, outputs, gathered, layout.transposed, layout.parts, splits,
        m, n, k, **layout.blocks.launch,
    )  # fmt: skip
    if splits > 1:
        sum_splits(parts.view(layers, splits, matrices), results)


def _default_layout(
    inputs: int, outputs: int, dtype: torch.dtype, gathered: Gathered | None, layers: int
) -> WeightLayout:
    """The fastest layout on an H200. Of the sums that gather, only those over banks of 384-248 channels were timed."""
    if dtype == torch.float32:
        return WeightLayout(FLOAT32_BLOCKS)
    transposed = inputs > outputs
    narrow, wide = sorted((inputs, outputs))
    columns = next(n for n in (256, 128, 64) if wide % n == 0 or n == 64)
    if narrow % 192 == 0:
        return WeightLayout(Blocks(64, columns, 64, 8, 3), 3, transposed)
    if wide >= LARGE:
        return WeightLayout(Blocks(128, min(columns, 128), 64, 8, 3), 1, transposed)
    if gathered is None:
        return WeightLayout(Blocks(64, 128, 64, 4, 3), 2)
    # Triton gives loads whose addresses are loaded too half as many buffers as there are stages: here three.
    if layers > 1 and narrow >= 128 and wide >= 256:
        return WeightLayout(Blocks(128, 256, 64, 8, 5))
    return WeightLayout(Blocks(64, 128, 64, 4, 5), 2)


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """The number of programs that share a sum of some steps, so that all of them fill the device."""
    return max(1, min(PROGRAMS_PER_SM * multiprocessors(device) // programs, steps // MIN_STEPS))


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
            rows = self.inputs.tensor, self.gradients.tensor
            with self.side.work(*rows, *(table for p in permutations for table in p.tables), *weights):
                weight_gradients(*rows, permutations, self.gathered, self.biased, results, row_weights=weights)
            self.release()
        experts, width, outputs = self.shape
        result, matrices = results[index], experts * width * outputs
        bias = result[matrices:].view(experts, outputs).data if self.biased else None
        return result[:matrices].view(self.shape).data, bias
