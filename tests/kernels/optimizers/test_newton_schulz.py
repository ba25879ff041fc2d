"""Newton-Schulz iterations by kernels against the reference."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.optimizers.newton_schulz import LARGE_UNIT, UNIT, NewtonSchulz, orthogonalized
from tests.kernels.comparison import TOLERANCES, nan_in_new_memory, relative_error
from tests.kernels.optimizers.stacked_matrices import by_kernels, random_matrices

SHAPES = [(130, 200), (384, 520), (3, 5), (248, 384), (1, 1), (64, 64), (140, 129), (190, 70)]


def test_all_shapes_at_once_are_as_exact_as_the_reference(device: str, dtype: torch.dtype) -> None:
    """Both round; bf16 is compared with float64 too."""
    matrices = random_matrices(SHAPES, device)
    with nan_in_new_memory():
        results = by_kernels(matrices, 5, dtype)
    for matrix, result in zip(matrices, results, strict=True):
        exact = orthogonalized(matrix[None].double(), 5)[0]
        error = relative_error(orthogonalized(matrix[None].to(dtype), 5)[0], exact)
        assert relative_error(result, exact) <= 1.2 * error + TOLERANCES[dtype]


def test_padding_wastes_little() -> None:
    places = NewtonSchulz([(384, 1536), (384, 248), (192, 768), (64, 5)], torch.device("cpu")).places
    assert [(p.unit, p.rows, p.columns) for p in places] == [
        (LARGE_UNIT, 384, 1536),
        (LARGE_UNIT, 256, 384),
        (UNIT, 192, 768),
        (UNIT, 64, 64),
    ]
