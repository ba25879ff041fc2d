"""A loss by slices against the same loss at once, gradients too."""

import pytest
import torch
from torch import Tensor, nn

from braidlm.training.features.distill.distillation import sliced_loss
from braidlm.training.features.distill.teachers import MAX_LOGITS, slices_of


@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_slices_cover_every_row_once(size: int, count: int) -> None:
    slices = slices_of(5, 4, 10, max_logits=size * 40)
    assert len(slices) == count
    assert [row for part in slices for row in range(5)[part]] == list(range(5))


def test_a_slice_has_at_least_one_sequence() -> None:
    assert slices_of(2, MAX_LOGITS, 2) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_gradients_are_those_of_the_whole(size: int) -> None:
    torch.manual_seed(0)
    head, hidden, weights = nn.Linear(3, 7), torch.randn(5, 4, 3, requires_grad=True), torch.randn(5, 4)
    inputs = (hidden, torch.randn(5, 4, requires_grad=True))

    def evaluate(part: slice, rows: Tensor, shares: Tensor) -> Tensor:
        return (head(rows).logsumexp(-1) * weights[part] * shares).sum()

    unused = nn.Parameter(torch.ones(2))
    parameters = list(head.parameters())
    whole = evaluate(slice(0, 5), *inputs) * 3
    sliced = sliced_loss(evaluate, inputs, slices_of(5, 4, 7, size * 28), parameters) * 3
    torch.testing.assert_close(sliced, whole)
    wide = sliced_loss(evaluate, inputs, slices_of(5, 4, 7, 28), [*parameters, unused])
    assert torch.autograd.grad(wide, unused)[0].tolist() == [0.0, 0.0]
    for found, expected in zip(
        torch.autograd.grad(sliced, [*inputs, *parameters]),
        torch.autograd.grad(whole, [*inputs, *parameters]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(sliced_loss(evaluate, inputs, slices_of(5, 4, 7, 28), parameters) * 3, whole)


def test_nothing_of_the_head_may_be_trained() -> None:
    head, hidden = nn.Linear(3, 7).requires_grad_(False), torch.randn(2, 4, 3, requires_grad=True)
    loss = sliced_loss(lambda part, rows: head(rows).square().sum(), [hidden], slices_of(2, 4, 7, 28), [])
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(head(hidden).square().sum(), hidden)[0]
    )
