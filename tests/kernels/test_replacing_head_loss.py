"""The head's own loss against cross entropy of its logits, gradients too."""

import pytest
import torch

from braidlm.kernels.replacing import LeanLinearHead
from braidlm.model.heads.losses import IGNORED, next_token_loss


def linear_head(width: int, vocabulary: int, bias: bool = False) -> LeanLinearHead:
    return LeanLinearHead(LeanLinearHead.Config(bias=bias), width, vocabulary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [None, 12.0])
def test_the_loss_in_place_equals_autograd(dtype: torch.dtype, count: float | None) -> None:
    torch.manual_seed(0)
    head = linear_head(8, 300).to(dtype)
    hidden = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 300, (3, 7))
    labels[0, 2:] = IGNORED
    fused, plain = head.loss(hidden, labels, count), next_token_loss(head(hidden), labels, count)
    torch.testing.assert_close(fused, plain.to(fused.dtype), check_dtype=False)
    ours = torch.autograd.grad(2.5 * fused, (hidden, head.weight))
    theirs = torch.autograd.grad(2.5 * plain, (hidden, head.weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_very_improbable_label_has_a_finite_loss() -> None:
    head = linear_head(1, 3)
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.weight[0] = 500.0
    loss = head.loss(torch.ones(1, 1, 1, requires_grad=True), torch.tensor([[2]]))
    assert loss.item() == pytest.approx(500.0)


def test_a_batch_with_no_label_costs_nothing() -> None:
    head = linear_head(4, 9)
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = head.loss(hidden, torch.full((2, 3), IGNORED), 6.0)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() == 0.0


def test_a_head_with_a_bias_has_the_plain_loss() -> None:
    head, hidden = linear_head(8, 20, bias=True), torch.randn(2, 5, 8)
    labels = torch.randint(0, 20, (2, 5))
    torch.testing.assert_close(head.loss(hidden, labels), next_token_loss(head(hidden), labels))
