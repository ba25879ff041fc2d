"""The head's loss with the teachers' top k tokens by the kernel against cross entropy and the plain divergence."""

import pytest

pytest.importorskip("triton")
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.ops.soft_head_loss import TopTokens, soft_targets_to_gradient_, taught_head_loss
from braidlm.model.heads.losses import IGNORED
from braidlm.training.features.distill.distillation import top_k_divergence
from tests.kernels.comparison import TOLERANCES, assert_close

ROWS = 6


def top_tokens(vocabulary: int, k: int, weight: float, device: str) -> TopTokens:
    """Of a teacher with random logits."""
    best = torch.randn(2, ROWS // 2, vocabulary, device=device).mul(2).log_softmax(-1).topk(k)
    return TopTokens(best.indices.int(), best.values, 1 - weight, weight)


def expected_losses(logits: Tensor, labels: Tensor, count: Tensor, soft: TopTokens) -> tuple[Tensor, Tensor]:
    """Text and divergence by the plain functions."""
    rows = top_k_divergence(soft.ids.flatten(0, 1).long(), soft.logs.flatten(0, 1).to(logits.dtype), logits, 1.0)
    text = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return text / count, torch.where(labels != IGNORED, rows, 0.0).sum() / count


@pytest.mark.parametrize(("vocabulary", "k"), [(37, 1), (37, 5), (37, 37), (4997, 64)])
@pytest.mark.parametrize(("weight", "upstream"), [(0.5, 1.0), (0.0, 1.0), (1.0, 0.25)])
def test_taught_loss_equals_the_plain_one(
    vocabulary: int, k: int, weight: float, upstream: float, device: str, dtype: torch.dtype
) -> None:
    """Labels are among the top k or not."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, 24, device=device).to(dtype).requires_grad_()
    matrix = (torch.randn(vocabulary, 24, device=device) * 24**-0.5).requires_grad_()
    soft = top_tokens(vocabulary, k, weight, device)
    labels, count = torch.randint(0, vocabulary, (ROWS,), device=device), torch.tensor(11.0, device=device)
    labels[0], labels[2:4] = soft.ids[0, 0, -1], IGNORED
    found = taught_head_loss(soft, hidden, matrix, None, labels, count, IGNORED, None)
    (upstream * found.weighted).backward()

    exact_hidden, exact_matrix = (x.detach().to(dtype).double().requires_grad_() for x in (hidden, matrix))
    text, taught = expected_losses(exact_hidden @ exact_matrix.t(), labels, count, soft)
    (upstream * ((1 - weight) * text + weight * taught)).backward()
    tolerance = TOLERANCES[dtype]
    assert_close(found.text, text, tolerance, "text")
    assert_close(found.divergence, taught, tolerance, "divergence")
    assert_close(hidden.grad, exact_hidden.grad, tolerance, "gradient of the stream")
    assert_close(matrix.grad, exact_matrix.grad, tolerance, "gradient of the weight")


def test_a_model_that_all_but_excludes_the_others(device: str) -> None:
    """What it leaves to them is less than float32 resolves beside 1, but its logarithm is known."""
    torch.manual_seed(0)
    soft = top_tokens(50, 4, 0.5, device)
    logits = torch.randn(ROWS, 50, device=device)
    logits.scatter_(1, soft.ids.flatten(0, 1).long(), 60.0)
    labels, count = torch.randint(0, 50, (ROWS,), device=device), torch.ones((), device=device)
    expected = top_k_divergence(soft.ids.flatten(0, 1).long(), soft.logs.flatten(0, 1), logits, 1.0)
    _, divergences = soft_targets_to_gradient_(logits, labels, count, soft, IGNORED)
    assert expected.min() > 1  # most of it is of the others
    torch.testing.assert_close(divergences, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [0.0, 1e-7], ids=["nothing", "rounding"])
def test_teachers_that_leave_nothing_to_the_others(left: float, device: str) -> None:
    soft = TopTokens(
        torch.tensor([[[3, 7, 2]]], device=device, dtype=torch.int32),
        torch.tensor([[[0.75 - left, 0.25, 0.0]]], device=device).log(),
        0.0,
        1.0,
    )
    logits = torch.randn(1, 20, device=device)
    exact = logits.double().requires_grad_()
    labels, count = torch.tensor([5], device=device), torch.ones((), device=device)
    _, taught = expected_losses(exact, labels, count, soft)
    taught.backward()
    _, divergences = soft_targets_to_gradient_(logits, labels, count, soft, IGNORED)
    assert_close(divergences.sum(), taught, 1e-5, "divergence")
    assert_close(logits, exact.grad, 1e-5, "gradient of the logits")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_at_real_size() -> None:
    torch.manual_seed(0)
    rows, vocabulary = 2048, 16_384
    best = (torch.randn(4, rows // 4, vocabulary, device="cuda") * 3).log_softmax(-1).topk(64)
    soft = TopTokens(best.indices.int(), best.values, 0.3, 0.7)
    logits = (torch.randn(rows, vocabulary, device="cuda") * 3).bfloat16()
    labels, count = torch.randint(0, vocabulary, (rows,), device="cuda"), torch.tensor(float(rows), device="cuda")
    labels[::7] = IGNORED
    exact = logits.double().requires_grad_()
    text, taught = expected_losses(exact, labels, count, soft)
    (0.3 * text + 0.7 * taught).backward()
    losses, divergences = soft_targets_to_gradient_(logits, labels, count, soft, IGNORED)
    assert_close(losses.sum(), text, 1e-5, "text")
    assert_close(divergences.sum(), taught, 1e-5, "divergence")
    assert_close(logits, exact.grad, TOLERANCES[torch.bfloat16], "gradient of the logits")
