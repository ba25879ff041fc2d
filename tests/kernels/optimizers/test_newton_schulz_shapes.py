"""Newton-Schulz iterations by kernels: no shape, and no neighbour in the stack, changes a matrix's result."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("hypothesis")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.kernels.optimizers.newton_schulz import orthogonalized
from tests.kernels.optimizers.stacked_matrices import by_kernels, random_matrices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=10)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=3),
    steps=st.integers(1, 4),
)
def test_any_shapes_equal_the_reference(shapes: list[tuple[int, int]], steps: int) -> None:
    matrices = random_matrices(shapes, DEVICE)
    for matrix, result in zip(matrices, by_kernels(matrices, steps, torch.float32), strict=True):
        expected = orthogonalized(matrix[None].double(), steps)[0]
        torch.testing.assert_close(result.double(), expected, atol=5e-5, rtol=0)
