"""Matrices in the stack that Newton-Schulz iterations run on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from braidlm.kernels.optimizers.newton_schulz import NewtonSchulz


def random_matrices(shapes: Sequence[tuple[int, int]], device: str) -> list[Tensor]:
    """Wide ones, with singular values of many sizes."""
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(min(shape), max(shape), generator=generator) for shape in shapes]
    return [(matrix * torch.logspace(-2, 2, len(matrix))[:, None]).to(device) for matrix in matrices]


def by_kernels(matrices: list[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
    """The results, whose padding must be zeros."""
    newton_schulz = NewtonSchulz([(len(m), m.shape[1]) for m in matrices], matrices[0].device)
    stack = torch.zeros(newton_schulz.elements, dtype=dtype, device=matrices[0].device)

    def stored(flat: Tensor) -> list[Tensor]:
        return [flat[p.offset : p.offset + p.rows * p.columns].view(p.rows, p.columns) for p in newton_schulz.places]

    for matrix, padded in zip(matrices, stored(stack), strict=True):
        padded[: len(matrix), : matrix.shape[1]] = matrix
    results = stored(newton_schulz.run(stack, torch.stack([1 / matrix.norm() for matrix in matrices]), steps))
    for matrix, padded in zip(matrices, results, strict=True):
        assert not padded[len(matrix) :].any()
        assert not padded[:, matrix.shape[1] :].any()
    return [padded[: len(m), : m.shape[1]] for m, padded in zip(matrices, results, strict=True)]
