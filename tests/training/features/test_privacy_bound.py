"""The bound: what opacus counts beside what is known exactly, and a row that is looked for in what comes out."""

import math

import pytest
import torch
from torch import nn

from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import poisson_sample
from braidlm.training.features.privacy import PrivacyConfig, epsilon_spent, noise_multiplier
from tests.tiny_models import tiny_model
from tests.training.features.test_privacy import BOUND, ROWS, batch, private_step

pytest.importorskip("opacus", reason="it counts the noise")


def test_what_comes_out_tells_a_row_as_often_as_its_distribution_says() -> None:
    """One step of four rows with or without a fifth, whose gradient is long and points away from all others: whoever
    guesses from the noisy sum is right as often as for the normal distribution with this noise, which is an epsilon
    below the one that is told."""
    times, rate, threshold, delta, privacy = 1200, 0.5, 1.0, 1e-2, private_step(tiny_model(), *batch())[0]
    weight = nn.Parameter(torch.zeros(8))
    privacy.sums = {weight: torch.zeros(8)}
    gradients = torch.cat((torch.eye(8)[:4] * 3.0, torch.eye(8)[7:] * 100.0))

    def guesses(rows: int) -> float:
        found = 0
        for step in range(times):
            drawn = gradients[poisson_sample(rows, rate, rows, step)]
            for part in drawn.split(2):  # as in passes of two rows
                privacy._add(list(privacy.sums.values()), [part])
            privacy.end_gradients()
            assert weight.grad is not None
            found += weight.grad[7].item() * ROWS / BOUND["clip"] > threshold
        return found / times

    def above(at: float) -> float:
        return 0.5 * math.erfc(at / 2**0.5)

    wrong, right = guesses(4), guesses(5)
    expected = above(threshold), rate * above(threshold - 1) + (1 - rate) * above(threshold)
    for share, wanted in zip((wrong, right), expected, strict=True):
        assert abs(share - wanted) < 4.5 * (wanted * (1 - wanted) / times) ** 0.5
    assert 0.69 < math.log((expected[1] - delta) / expected[0]) < epsilon_spent(1.0, rate, 1, delta)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 1.0, 1), (0.6, 1.0, 1), (3.0, 1.0, 9), (0.8, 0.1, 1)])
def test_epsilon_is_no_less_than_the_exact_one(noise: float, rate: float, steps: int) -> None:
    """Steps that read every row are one with less noise; of one step that draws rows, the exact delta is known too."""
    epsilon, deviation = epsilon_spent(noise, rate, steps, 1e-5), noise / steps**0.5

    def above(at: float) -> float:
        return 0.5 * math.erfc(at / deviation / 2**0.5)

    def delta(epsilon: float) -> float:
        """With the row, and without: how likely what comes out is above `at`, where the two differ by e^epsilon."""
        at = deviation**2 * math.log((math.exp(epsilon) - 1 + rate) / rate) + 0.5
        return rate * above(at - 1) + (1 - rate) * above(at) - math.exp(epsilon) * above(at)

    assert delta(epsilon) <= 1e-5 < delta(0.8 * epsilon)


def test_epsilon_of_a_published_example() -> None:
    """TensorFlow Privacy's tutorial: 60,000 examples, batches of 250, noise 1.3, 15 epochs and delta 1e-5 give epsilon
    1.18 by the conversion of its time (Mironov, 2017); opacus converts more tightly (Balle and others, 2020)."""
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    divergences = compute_rdp(q=250 / 60_000, noise_multiplier=1.3, steps=3600, orders=orders)
    published = min(rdp + math.log(1e5) / (order - 1) for rdp, order in zip(divergences, orders, strict=True))
    assert published == pytest.approx(1.18, abs=0.01)
    assert 0.9 < epsilon_spent(1.3, 250 / 60_000, 3600, 1e-5) < published


def test_the_noise_keeps_the_bound() -> None:
    for epsilon in (1.0, 8.0):
        noise = noise_multiplier(epsilon, 1e-5, 0.01, 500)
        assert 0.97 * epsilon < epsilon_spent(noise, 0.01, 500, 1e-5) <= epsilon
    assert noise_multiplier(1.0, 1e-5, 0.01, 500) > noise_multiplier(8.0, 1e-5, 0.01, 500)


def test_a_run_goes_on_with_its_noise_if_that_keeps_the_bound() -> None:
    """However much another version of what counts it would ask for."""
    privacy, _ = private_step(tiny_model(), *batch())
    needed = noise_multiplier(8, 1e-5, 0.01, 100)
    privacy.steps, privacy.noise = 100, 1.1 * needed
    saved = privacy.state()
    privacy.noise = needed
    privacy.load_state(saved)
    assert privacy.noise == 1.1 * needed
    with pytest.raises(BraidError, match="was chosen for a smaller budget"):
        privacy.load_state({"noise": torch.tensor(0.9 * needed, dtype=torch.float64)})


@pytest.mark.parametrize(("delta", "warned"), [(1e-5, 0), (0.1, 1)])
def test_a_delta_that_bounds_nothing_is_warned_of(delta: float, warned: int) -> None:
    privacy, _ = private_step(tiny_model(), *batch(), count=20, unit="document")
    privacy.config = PrivacyConfig(epsilon=8, delta=delta)
    assert ["20 documents" in warning for warning in privacy.warnings()] == [True] * warned


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_a_gradient_that_is_a_number_adds_nothing(broken: float) -> None:
    privacy, _ = private_step(tiny_model(), *batch())
    sums, gradient = [torch.zeros(3)], torch.tensor([[3.0, 0.0, 4.0], [broken, 1.0, 2.0], [1e30, 0.0, 0.0]])
    privacy._add(sums, [gradient])
    torch.testing.assert_close(sums[0], torch.tensor([0.3, 0.0, 0.4]), atol=1e-6, rtol=1e-6)
