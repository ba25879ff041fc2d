"""Grouped products with blocks of every shape against torch's products, and what they must not read."""

from itertools import product

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.ops.launch import Blocks
from braidlm.kernels.routed.combine import combine
from braidlm.kernels.routed.grouped.products import grouped_backward, grouped_forward, plain_grouped
from braidlm.kernels.routed.grouped.weights import WeightLayout, grouped_weight_gradient
from braidlm.kernels.routed.permutation import plain_permute
from tests.kernels.comparison import TOLERANCES, assert_close
from tests.kernels.sorted_rows import TILE, choices, real_rows


@pytest.mark.parametrize(
    "blocks",
    [Blocks(16, 32, 16, 4, 2), Blocks(32, 16, 32, 4, 3), Blocks(64, 64, 32, 4, 2)],
    ids=lambda b: f"{b.rows}x{b.columns}x{b.inner}",
)
def test_products_equal_torch_with_blocks_that_do_not_divide_the_matrices(
    blocks: Blocks, device: str, dtype: torch.dtype
) -> None:
    permutation = plain_permute(choices(60, 3, 2, device), 3, 2, 32)
    real, owner = real_rows(permutation), permutation.tile_expert.repeat_interleave(permutation.tile)
    rows = torch.randn(permutation.rows, 40, device=device).to(dtype)
    weight = torch.randn(3, 40, 72, device=device).to(dtype)
    gradient = torch.zeros(permutation.rows, 72, device=device).to(dtype)
    gradient[real] = torch.randn(len(real), 72, device=device).to(dtype)
    tokens = torch.randn(60, 40, device=device).to(dtype)
    tolerance = TOLERANCES[dtype]
    forward, _ = grouped_forward(rows, weight, permutation, blocks=blocks)
    assert_close(forward[real], plain_grouped(rows.double(), weight.double(), permutation)[real], tolerance, "forward")
    backward, *_ = grouped_backward(gradient, weight, permutation, blocks=blocks)
    expected = plain_grouped(gradient.double(), weight.double().transpose(1, 2), permutation)
    assert_close(backward[real], expected[real], tolerance, "backward")
    of_rows, of_tokens = (
        torch.stack([inputs[owner == e].double().t() @ gradient[owner == e].double() for e in range(3)])
        for inputs in (rows, tokens[permutation.source.clamp_min(0).long()])
    )
    of_bias = torch.stack([gradient[owner == e].double().sum(0) for e in range(3)])
    for parts, transposed in product((1, 2, 3), (False, True)):
        layout = WeightLayout(blocks, parts, transposed)
        weights, bias = grouped_weight_gradient(rows, gradient, permutation, bias=True, layout=layout)
        assert_close(weights, of_rows, tolerance, f"gradient of the weight with {layout}")
        assert_close(bias, of_bias, tolerance, f"gradient of the bias with {layout}")
        gathered, _ = grouped_weight_gradient(tokens, gradient, permutation, "inputs", layout=layout)
        assert_close(gathered, of_tokens, tolerance, f"gradient of the weight of gathered tokens with {layout}")


def test_rows_beyond_the_last_used_tile_are_never_read(device: str, dtype: torch.dtype) -> None:
    permutation = plain_permute(torch.ones(10, 1, dtype=torch.long, device=device), 3, 1, TILE)
    used = int(permutation.expert_offsets[-1])
    assert used < permutation.rows
    rows, gradient = (torch.randn(permutation.rows, 24, device=device).to(dtype) for _ in range(2))
    rows[used:], gradient[used:] = torch.nan, torch.nan
    gradient[10:used] = 0
    weight = torch.randn(3, 24, 24, device=device).to(dtype)
    value, inner = grouped_forward(rows, weight, permutation, activation="relu")
    backward, *_ = grouped_backward(gradient, weight, permutation, inner, "relu")
    weights, bias = grouped_weight_gradient(rows, gradient, permutation, bias=True)
    for result in (value[:used], backward[:used], weights, bias, combine(rows, None, permutation)):
        assert result.isfinite().all()
    for unused in (0, 2):
        assert not weights[unused].any(), "an expert without rows has a gradient of zeros"
        assert not bias[unused].any()
