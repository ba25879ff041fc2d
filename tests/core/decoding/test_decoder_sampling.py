"""Choosing tokens, against a slow reference."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.errors import BraidError


def slow_probabilities(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """Sorted lists and sums; slow and easy to believe."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda i: logits[i])
        return [float(i == best) for i in range(len(logits))]
    best = max(logits)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if top_p is not None and mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@given(
    st.lists(st.integers(-800, 800), min_size=1, max_size=12, unique=True),
    st.just(0.0) | st.floats(0.3, 3),
    st.none() | st.integers(1, 15),
    st.none() | st.sampled_from([0.001, 0.1, 0.371, 0.5, 0.777, 0.93, 0.999, 1.0]),
)
def test_probabilities_are_the_slow_ones(
    hundredths: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = [h / 100 for h in hundredths]
    expected = slow_probabilities(logits, temperature, top_k, top_p)
    got = Sampling(temperature, top_k, top_p).probabilities(torch.tensor([logits]))[0]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=1), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.7)], ids=str)
def test_tokens_come_as_often_as_their_probability(sampling: Sampling) -> None:
    logits = torch.tensor([2.0, 1.5, 0.2, 0.0, -1.0, -3.0])
    draws = 20_000
    chosen = sampling.choose(logits.expand(draws, 6), torch.Generator().manual_seed(7))
    frequency = torch.bincount(chosen, minlength=6) / draws
    expected = sampling.probabilities(logits[None])[0]
    assert (frequency - expected).abs().max() < 4 * 0.5 / math.sqrt(draws)
    assert (frequency[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -0.1}, "temperature: expected a number from 0 to 1000, got -0.1"),
        ({"top_k": 0}, "top_k: expected a whole number from 1 to"),
        ({"top_p": 0.0}, "top_p: expected a number above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected a number above 0 and at most 1, got 1.5"),
    ],
)
def test_impossible_choices_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError, match=text.replace(".", r"\.")):
        Sampling(**options)


@pytest.mark.parametrize("option", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sampling_by_what_is_no_number_is_refused(option: str, value: float) -> None:
    with pytest.raises(BraidError, match=f"{option}: expected a number"):
        Sampling(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_torch_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(BraidError, match="seed: expected a whole number from 0 to"):
        Sampling(seed=seed)


def test_a_tiny_temperature_is_nearly_0() -> None:
    probabilities = Sampling(1e-300, top_k=2, top_p=0.9).probabilities(torch.tensor([[1.0, 3.0, 2.0]]))
    assert probabilities.tolist() == [[0.0, 1.0, 0.0]]
