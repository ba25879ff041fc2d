"""Gradients of the matrices of several banks by one launch, and the layouts that are chosen for them."""

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton")
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidlm.kernels.ops.launch import Blocks
from braidlm.kernels.routed.grouped.weights import Gathered, WeightLayout, _default_layout, weight_gradients
from braidlm.kernels.routed.permutation import permute
from tests.kernels.comparison import TOLERANCES, assert_close
from tests.kernels.sorted_rows import choices

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on an H100 or H200."""


@pytest.mark.parametrize("gathered", ["inputs", "gradients"])
@pytest.mark.parametrize(("inputs", "outputs"), [(140, 264), (264, 140)])
def test_layers_of_one_launch_get_their_own_gradients(
    gathered: Gathered, inputs: int, outputs: int, device: str, dtype: torch.dtype
) -> None:
    """By the large blocks of stacks, of matrices that no block divides."""
    layers, tokens, experts = 3, 50, 3
    permutations = [permute(choices(tokens, experts, 2, device), experts, 2) for _ in range(layers)]
    rows = permutations[0].rows
    read = torch.randn(layers, tokens if gathered == "inputs" else rows, inputs, device=device).to(dtype)
    gradients = torch.randn(layers, tokens if gathered == "gradients" else rows, outputs, device=device).to(dtype)
    for layer, permutation in enumerate(permutations):  # padding of the sorted side is zero
        (gradients if gathered == "inputs" else read)[layer, permutation.source < 0] = 0
    results = torch.empty(layers, experts * inputs * outputs, device=device)
    layout = WeightLayout(Blocks(128, 256, 16, 8, 5))  # few rows at once, for the sake of float32
    weight_gradients(read, gradients, permutations, gathered, False, results, layout)
    for layer, permutation in enumerate(permutations):
        source, owner = (
            permutation.source.clamp_min(0).long(),
            permutation.tile_expert.repeat_interleave(permutation.tile),
        )
        left = read[layer][source] if gathered == "inputs" else read[layer]
        right = gradients[layer][source] if gathered == "gradients" else gradients[layer]
        expected = torch.stack([left[owner == e].double().t() @ right[owner == e].double() for e in range(experts)])
        assert_close(results[layer].view(expected.shape), expected, TOLERANCES[dtype], f"layer {layer}")


@given(
    widths=st.tuples(*[st.integers(2, 512).map(lambda n: 8 * n)] * 2),
    gathered=st.sampled_from([None, "inputs", "gradients"]),
    layers=st.integers(1, 12),
)
def test_layouts_fit_into_shared_memory(widths: tuple[int, int], gathered: Gathered | None, layers: int) -> None:
    """Triton gives loads whose addresses are loaded too half as many buffers as there are stages."""
    layout = _default_layout(*widths, torch.bfloat16, gathered, layers)
    blocks = layout.blocks
    buffers = blocks.stages if gathered is None else (blocks.stages + 1) // 2
    assert 2 * buffers * blocks.inner * (blocks.rows * layout.parts + blocks.columns) <= SHARED_MEMORY
