"""The head's loss with soft targets by the kernel against cross entropy and divergence of plain logits."""

import pytest

pytest.importorskip("triton")
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.ops.soft_head_loss import TeacherLogits, soft_targets_to_gradient_, taught_head_loss
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.heads.losses import IGNORED
from braidlm.training.features.distill.distillation import divergence
from braidlm.training.features.distill.teachers import averaged_log_probabilities
from tests.kernels.comparison import TOLERANCES, assert_close

ROWS = 6


def soft_targets(
    vocabulary: int, shares: tuple[float, ...], weight: float, device: str, dtype: torch.dtype
) -> TeacherLogits:
    """Teachers whose logits have padding of different sizes behind their rows."""
    logits = [
        torch.randn(2, ROWS // 2, vocabulary + 16 * k, device=device).mul(2).to(dtype)[..., :vocabulary]
        for k in range(len(shares))
    ]
    return TeacherLogits(tuple(logits), shares, 1 - weight, weight)


def expected_losses(logits: Tensor, labels: Tensor, count: Tensor, soft: TeacherLogits) -> tuple[Tensor, Tensor]:
    """Text and divergence by their formulas."""
    pairs = zip(soft.logits, soft.shares, strict=True)
    taught = sum(share * teacher.flatten(0, 1).double().softmax(-1) for teacher, share in pairs)
    own = logits.log_softmax(-1)[:, : taught.shape[1]]
    rows = (taught * (taught.log() - own)).sum(-1)
    text = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return text / count, torch.where(labels != IGNORED, rows, 0.0).sum() / count


@pytest.mark.parametrize(("vocabulary", "padding"), [(37, 0), (4980, 20)], ids=["one block", "several, padded"])
@pytest.mark.parametrize("shares", [(1.0,), (0.2, 0.5, 0.3)], ids=["one teacher", "three teachers"])
@pytest.mark.parametrize(("weight", "upstream", "tied"), [(0.5, 1.0, False), (0.0, 1.0, False), (1.0, 0.25, True)])
def test_taught_loss_equals_its_formula(
    vocabulary: int,
    padding: int,
    shares: tuple[float, ...],
    weight: float,
    upstream: float,
    tied: bool,
    device: str,
    dtype: torch.dtype,
) -> None:
    """The model may have more entries than its teachers."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, 24, device=device).to(dtype).requires_grad_()
    matrix = (torch.randn(vocabulary + padding, 24, device=device) * 24**-0.5).requires_grad_()
    labels, count = torch.randint(0, vocabulary, (ROWS,), device=device), torch.tensor(11.0, device=device)
    labels[2:4] = IGNORED
    soft = soft_targets(vocabulary, shares, weight, device, dtype)
    deferred = DeferredGradient() if tied else None
    found = taught_head_loss(soft, hidden, matrix, None, labels, count, IGNORED, deferred)
    (upstream * found.weighted).backward()
    if deferred is not None:
        assert matrix.grad is None
        matrix.grad = deferred.read()

    exact_hidden, exact_matrix = (x.detach().to(dtype).double().requires_grad_() for x in (hidden, matrix))
    text, taught = expected_losses(exact_hidden @ exact_matrix.t(), labels, count, soft)
    (upstream * ((1 - weight) * text + weight * taught)).backward()
    tolerance = TOLERANCES[dtype]
    assert_close(found.text, text, tolerance, "text")
    assert_close(found.divergence, taught, tolerance, "divergence")
    assert_close(found.weighted, (1 - weight) * text + weight * taught, tolerance, "weighted sum")
    assert_close(hidden.grad, exact_hidden.grad, tolerance, "gradient of the stream")
    assert_close(matrix.grad, exact_matrix.grad, tolerance, "gradient of the weight")
    assert not found.text.requires_grad
    assert not found.divergence.requires_grad


def test_rows_are_what_the_plain_distillation_says(device: str, dtype: torch.dtype) -> None:
    """Each row by itself, with a probability that underflows, and one that the model all but excludes."""
    torch.manual_seed(1)
    soft = soft_targets(50, (0.4, 0.6), 0.5, device, dtype)
    for teacher in soft.logits:
        teacher[0, 0, 7] = -200.0
    logits = torch.randn(ROWS, 50, device=device).to(dtype)
    logits[1, 3] = -60.0
    labels, count = torch.randint(0, 50, (ROWS,), device=device), torch.ones((), device=device)
    labels[4] = IGNORED
    averaged = averaged_log_probabilities([teacher.flatten(0, 1) for teacher in soft.logits], soft.shares, 1.0)
    expected = torch.where(labels != IGNORED, divergence(averaged, logits, 1.0), 0.0)
    losses, divergences = soft_targets_to_gradient_(logits, labels, count, soft, IGNORED)
    torch.testing.assert_close(divergences, expected, rtol=1e-5, atol=1e-5)
    assert losses[4] == 0
    assert not logits[4].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_at_real_size() -> None:
    """Four teachers of the whole vocabulary, in bf16."""
    torch.manual_seed(0)
    rows, vocabulary = 2048, 16_384
    soft = TeacherLogits(
        tuple((torch.randn(4, rows // 4, vocabulary, device="cuda") * 3).bfloat16() for _ in range(4)),
        (0.1, 0.2, 0.3, 0.4),
        0.3,
        0.7,
    )
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
