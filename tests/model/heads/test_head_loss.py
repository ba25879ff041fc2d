"""The fused head and loss against the plain context: in Triton's interpreter here, on the device where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from braidlm.kernels.ops.head_loss import to_gradient_cuda_
from braidlm.model.heads.losses import IGNORED, head_loss, next_token_loss

CASE = """
import torch
from braidlm.kernels.ops import head_loss
from braidlm.kernels.ops.head_loss import HeadLoss

# The kernels, in the interpreter: they already divide by the count.
head_loss.to_gradient_ = lambda *x: head_loss.to_gradient_cuda_(x[0], x[1], torch.tensor(1.0), x[2])

torch.manual_seed(0)
for vocabulary in (100, 9000):
    hidden = torch.randn(6, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (6,))
    labels[2] = -100
    count = torch.tensor(5.0)
    fused = HeadLoss.apply(hidden, weight, None, labels, count, -100, None, None)
    plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum") / count
    torch.testing.assert_close(fused, plain)
    ours = torch.autograd.grad(3 * fused, (hidden, weight))
    theirs = torch.autograd.grad(3 * plain, (hidden, weight))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
print("equal")
"""


def test_kernel_equals_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    run = subprocess.run(
        [sys.executable, "-c", CASE], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 16384, 50257])
def test_kernel_equals_the_reference_on_the_device(dtype: torch.dtype, vocabulary: int) -> None:
    assert to_gradient_cuda_ is not None
    torch.manual_seed(0)
    head = torch.nn.Linear(64, vocabulary, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(4, 33, 64, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (4, 33), device="cuda")
    labels[1, 5:] = IGNORED
    fused = head_loss(head, hidden, labels, 77.0)
    plain = next_token_loss(head(hidden), labels, 77.0)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-2}
    torch.testing.assert_close(fused.float(), plain.float(), **tolerance)
    ours = torch.autograd.grad(fused, (hidden, head.weight))
    theirs = torch.autograd.grad(plain, (hidden, head.weight))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).float().norm() / b.float().norm() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [None, 12.0])
def test_plain_operations_equal_autograd(dtype: torch.dtype, count: float | None) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 300, bias=False, dtype=dtype)
    hidden = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 300, (3, 7))
    labels[0, 2:] = IGNORED
    fused, plain = head_loss(head, hidden, labels, count), next_token_loss(head(hidden), labels, count)
    torch.testing.assert_close(fused, plain.to(fused.dtype), check_dtype=False)
    ours = torch.autograd.grad(2.5 * fused, (hidden, head.weight))
    theirs = torch.autograd.grad(2.5 * plain, (hidden, head.weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_very_improbable_label_has_a_finite_loss() -> None:
    head = torch.nn.Linear(1, 3, bias=False)
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.weight[0] = 500.0
    loss = head_loss(head, torch.ones(1, 1, 1, requires_grad=True), torch.tensor([[2]]))
    assert loss.item() == pytest.approx(500.0)


def test_a_batch_with_no_label_costs_nothing() -> None:
    head = torch.nn.Linear(4, 9, bias=False)
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = head_loss(head, hidden, torch.full((2, 3), IGNORED), 6.0)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() == 0.0


def test_a_head_with_a_bias_takes_the_plain_way() -> None:
    head, hidden = torch.nn.Linear(8, 20), torch.randn(2, 5, 8)
    labels = torch.randint(0, 20, (2, 5))
    torch.testing.assert_close(head_loss(head, hidden, labels), next_token_loss(head(hidden), labels))
