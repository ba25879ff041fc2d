"""The head's loss by the kernel against cross entropy of its logits."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.ops.ends import HeadLoss
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.heads.losses import IGNORED, next_token_loss
from tests.kernels.comparison import TOLERANCES, assert_close


@pytest.mark.parametrize("vocabulary", [37, 5000], ids=["one block", "several blocks"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_head_loss_equals_cross_entropy(
    vocabulary: int, tied: bool, upstream: float, device: str, dtype: torch.dtype
) -> None:
    hidden = torch.randn(9, 24, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 24, device=device) * 24**-0.5).requires_grad_()
    labels, count = torch.randint(0, vocabulary, (9,), device=device), torch.tensor(11.0, device=device)
    labels[2:4] = IGNORED
    deferred = DeferredGradient() if tied else None
    loss = HeadLoss.apply(hidden, weight, None, labels, count, IGNORED, deferred)
    (upstream * loss).backward()
    if deferred is not None:
        assert weight.grad is None
        weight.grad = deferred.read()

    def exact(x: Tensor) -> Tensor:
        return x.detach().to(dtype).double().requires_grad_()

    exact_hidden, exact_weight = exact(hidden), exact(weight)
    logits = exact_hidden @ exact_weight.t()
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / count
    (upstream * expected).backward()
    torch.testing.assert_close(next_token_loss(logits, labels, count).double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(loss, expected, TOLERANCES[dtype], "loss")
    assert_close(hidden.grad, exact_hidden.grad, TOLERANCES[dtype], "gradient of the stream")
    assert_close(weight.grad, exact_weight.grad, TOLERANCES[dtype], "gradient of the weight")


def test_rows_without_a_label_cost_nothing(device: str) -> None:
    hidden = torch.randn(3, 8, device=device, requires_grad=True)
    labels = torch.full((3,), IGNORED, device=device)
    loss = HeadLoss.apply(hidden, torch.randn(9, 8, device=device), None, labels, hidden.new_ones(()), IGNORED, None)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
