"""The divergence from teachers against torch's own, whole and by the top k with one bucket for the rest."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from braidlm.training.features.distill.distillation import divergence, top_k_divergence
from braidlm.training.features.distill.teachers import averaged_log_probabilities

VOCABULARY = 7
sizes = st.floats(0.1, 8.0)
temperatures = st.floats(0.5, 5.0)


def logits(scale: float, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return scale * torch.randn(3, 5, vocabulary, generator=torch.Generator().manual_seed(seed))


@given(sizes, sizes, temperatures)
def test_it_is_torchs_divergence(teacher_scale: float, own_scale: float, temperature: float) -> None:
    one, own = logits(teacher_scale, 1), logits(own_scale, 2)
    teacher = averaged_log_probabilities([one], [1.0], temperature)
    expected = F.kl_div(
        (own / temperature).log_softmax(-1), (one / temperature).log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(divergence(teacher, own, temperature), expected, rtol=1e-4, atol=1e-5)


def test_probabilities_are_averaged_and_not_logits() -> None:
    one, other = logits(3.0, 1), logits(3.0, 2)
    averaged = averaged_log_probabilities([one, other], [0.25, 0.75], 2.0).exp()
    torch.testing.assert_close(averaged, 0.25 * (one / 2).softmax(-1) + 0.75 * (other / 2).softmax(-1))


def test_a_teacher_of_its_own_probabilities_teaches_nothing() -> None:
    own = logits(2.0, 1).requires_grad_()
    teacher = averaged_log_probabilities([own.detach()] * 2, [0.5, 0.5], 2.0)
    loss = divergence(teacher, own, 2.0).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(loss.item()) < 1e-5
    assert own.grad is not None
    assert own.grad.abs().max() < 1e-6


def test_learning_lowers_it() -> None:
    own = torch.zeros(3, 5, VOCABULARY, requires_grad=True)
    teacher = averaged_log_probabilities([logits(3.0, 1)], [1.0], 1.0)
    before = divergence(teacher, own, 1.0).sum()
    (gradient,) = torch.autograd.grad(before, own)
    assert divergence(teacher, own - 0.1 * gradient, 1.0).sum() < before


def test_rows_of_no_token_count_on_the_models_side_only() -> None:
    """A vocabulary that is padded to a round size: the teachers give those rows no probability."""
    own = logits(1.0, 2, VOCABULARY + 3)
    teacher = averaged_log_probabilities([logits(1.0, 1)], [1.0], 1.0)
    padded = F.pad(teacher.exp(), (0, 3))
    expected = (torch.xlogy(padded, padded) - padded * own.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(divergence(teacher, own, 1.0), expected)


def test_impossible_tokens_are_no_nan() -> None:
    teacher_logits, own = logits(1.0, 1), logits(1.0, 2)
    teacher_logits[..., 0] = own[..., 0] = -math.inf
    own.requires_grad_()
    loss = divergence(averaged_log_probabilities([teacher_logits], [1.0], 1.0), own, 1.0).sum()
    (gradient,) = torch.autograd.grad(loss, own)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@given(sizes, sizes, temperatures, st.integers(1, VOCABULARY))
def test_the_top_k_and_the_rest_are_a_coarser_distribution(
    teacher_scale: float, own_scale: float, temperature: float, k: int
) -> None:
    own = logits(own_scale, 2)
    teacher = averaged_log_probabilities([logits(teacher_scale, 1)], [1.0], temperature)
    best = teacher.topk(k)
    found = top_k_divergence(best.indices, best.values, own, temperature)

    def coarse(probabilities: torch.Tensor) -> torch.Tensor:
        kept = probabilities.gather(-1, best.indices)
        rest = probabilities.scatter(-1, best.indices, 0.0).sum(-1, keepdim=True)
        return torch.cat((kept, rest.clamp(min=1e-300)), -1)

    p, q = coarse(teacher.double().exp()), coarse((own.double() / temperature).softmax(-1))
    expected = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-4)
    assert (found <= divergence(teacher, own, temperature) + 1e-4).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_as_top_k_are_the_whole(temperature: float) -> None:
    own = logits(2.0, 2).requires_grad_()
    teacher = averaged_log_probabilities([logits(2.0, 1)], [1.0], temperature)
    best = teacher.topk(VOCABULARY)
    whole = divergence(teacher, own, temperature).sum()
    top = top_k_divergence(best.indices, best.values, own, temperature).sum()
    torch.testing.assert_close(top, whole, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(loss, own)[0] for loss in (whole, top)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
