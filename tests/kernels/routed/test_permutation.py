"""The permutation that sorts tokens by expert, against a stable sort."""

from dataclasses import fields

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.routed.permutation import Permutation, permute, plain_permute
from tests.kernels.sorted_rows import choices


def check_permutation(batch: int, length: int, experts: int, top_k: int, tile: int, device: str) -> None:
    dtype, empty = (torch.int64, None) if tile == 16 else (torch.int32, experts // 2 if top_k < experts else None)
    chosen = choices(batch * length, experts, top_k, device, empty).to(dtype)
    if batch > 2:
        chosen[:length] = chosen[:1]  # a sequence whose tokens all choose the same experts
    actual, again = (permute(chosen, experts, batch, tile) for _ in range(2))
    expected = plain_permute(chosen, experts, batch, tile)
    for field in fields(Permutation):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(ours, Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours, theirs), field.name
            assert torch.equal(ours, getattr(again, field.name)), field.name
        else:
            assert ours == theirs


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize(
    ("batch", "length", "experts", "top_k"), [(3, 7, 4, 2), (2, 40, 5, 1), (1, 1, 3, 3), (2, 33, 8, 8), (20, 3, 3, 2)]
)
def test_permutation_equals_a_stable_sort(
    batch: int, length: int, experts: int, top_k: int, tile: int, device: str
) -> None:
    check_permutation(batch, length, experts, top_k, tile, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize(("batch", "length", "experts", "top_k"), [(16, 512, 4, 2), (128, 512, 8, 2), (8, 1000, 64, 8)])
def test_permutation_equals_a_stable_sort_at_real_size(
    batch: int, length: int, experts: int, top_k: int, tile: int
) -> None:
    check_permutation(batch, length, experts, top_k, tile, "cuda")


def test_the_reference_on_numbers_worked_out_by_hand() -> None:
    permutation = plain_permute(torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0]]), 4, 2, tile=2)
    assert permutation.source.tolist() == [0, 2, 3, -1, 1, -1, 0, 1, 2, 3, -1, -1]
    assert permutation.row_of_choice.tolist() == [[6, 0], [7, 4], [1, 8], [9, 2]]
    assert permutation.tile_expert.tolist() == [0, 0, 1, 2, 2, -1]
    assert permutation.expert_offsets.tolist() == [0, 4, 6, 10, 10]
    assert permutation.sequence_offsets.tolist() == [[0, 1, 3], [4, 5, 5], [6, 8, 10], [10, 10, 10]]
    assert permutation.routed.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]
