"""The fast n-gram models against a plain one written straight from Chen and Goodman's definition."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.formats.held_out_text import bits_per_byte
from braidlm.evals.scoring.ngrams import FALLBACK_DISCOUNTS, NGramModel, fit_ngrams


class PlainKneserNey:
    """Dictionaries, loops and the formulas; slow and easy to believe."""

    def __init__(self, tokens: list[int], vocab_size: int, order: int):
        self.vocab_size, self.order = vocab_size, order
        grams = {n: [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for n in range(1, order + 1)}
        self.counts = {order: Counter(grams[order])}
        for n in range(1, order):
            before = defaultdict(set)
            for gram in grams[n + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[n] = Counter({gram: len(words) for gram, words in before.items()})
        self.discounts = {n: self.estimate(self.counts[n]) for n in self.counts}

    @staticmethod
    def estimate(counts: Counter) -> tuple[float, float, float]:
        n = Counter(counts.values())
        try:
            y = n[1] / (n[1] + 2 * n[2])
            d = tuple(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))
        except ZeroDivisionError:
            return FALLBACK_DISCOUNTS
        return d if all(0 < x < k for k, x in enumerate(d, 1)) and n[4] else FALLBACK_DISCOUNTS

    def probability(self, word: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        lower = self.probability(word, context[1:]) if context else 1 / self.vocab_size
        following = {gram[-1]: c for gram, c in self.counts[n].items() if gram[:-1] == context}
        total = sum(following.values())
        if total == 0:
            return lower
        d1, d2, d3 = self.discounts[n]
        n1 = sum(c == 1 for c in following.values())
        n2 = sum(c == 2 for c in following.values())
        n3 = sum(c >= 3 for c in following.values())
        c = following.get(word, 0)
        discount = 0.0 if c == 0 else (d1, d2, d3)[min(c, 3) - 1]
        return max(c - discount, 0) / total + (d1 * n1 + d2 * n2 + d3 * n3) / total * lower


def zipf(size: int, vocab_size: int, seed: int) -> np.ndarray:
    weights = 1 / np.arange(1, vocab_size + 1) ** 1.1
    return np.random.default_rng(seed).choice(vocab_size, size, p=weights / weights.sum())


def sticky(size: int, vocab_size: int, seed: int) -> np.ndarray:
    """Most tokens follow from the two before, so that there is something for a trigram model to learn."""
    rng = np.random.default_rng(seed)
    tokens = [1, 2]
    for surprise, other in zip(rng.random(size) < 0.2, rng.integers(vocab_size, size=size), strict=True):
        tokens.append(int(other) if surprise else (3 * tokens[-1] + 5 * tokens[-2] + 1) % vocab_size)
    return np.array(tokens[:size])


DATA = {
    "uniform": (np.random.default_rng(0).integers(0, 12, 600), 12),
    "zipf": (zipf(1500, 40, 1), 40),
    "sparse zipf": (zipf(3000, 600, 2), 600),
    "sticky": (sticky(1200, 30, 3), 30),
    "unseen half": (zipf(500, 20, 4), 50),
    "one word": (np.zeros(50, int), 3),
    "three tokens": (np.array([0, 1, 2]), 4),
    "two tokens": (np.array([0, 1]), 4),
    "one token": (np.array([2]), 4),
}


def distribution(model: NGramModel, context: list[int]) -> np.ndarray:
    """The probability of every word of the vocabulary after a context."""
    words = np.arange(model.vocab_size)[:, None]
    rows = np.concatenate([np.tile(np.array(context, int), (model.vocab_size, 1)), words], axis=1)
    return np.exp(model.log_probabilities(rows)[:, -1])


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("order", [1, 3])
def test_agrees_with_the_definition(name: str, order: int) -> None:
    tokens, vocab_size = DATA[name]
    fast = fit_ngrams(order, tokens, vocab_size)
    plain = PlainKneserNey(tokens.tolist(), vocab_size, order)
    np.testing.assert_allclose(
        [level.discounts for level in fast.levels], [plain.discounts[n + 1] for n in range(order)]
    )
    other = np.random.default_rng(9).integers(0, vocab_size, 60)
    for text in (tokens[:100], other):
        expected = [
            math.log(plain.probability(int(word), tuple(text[max(0, i - order + 1) : i].tolist())))
            for i, word in enumerate(text)
        ]
        np.testing.assert_allclose(fast.log_probabilities(text), expected, rtol=1e-9)


def test_discounts_are_estimated_where_the_data_allow_it() -> None:
    levels = fit_ngrams(3, zipf(5000, 1000, 8), 1000).levels
    assert all(level.discounts != FALLBACK_DISCOUNTS for level in levels)
    assert all(0 < d < k for level in levels for k, d in enumerate(level.discounts, start=1))


@pytest.mark.parametrize("name", DATA)
def test_probabilities_sum_to_one_after_any_context(name: str) -> None:
    tokens, vocab_size = DATA[name]
    contexts = [tokens[i : i + 2].tolist() for i in range(0, min(len(tokens), 40), 7)]
    contexts += [[], [0], [vocab_size - 1], [vocab_size - 1, vocab_size - 1], [vocab_size - 1, 0], [0, vocab_size - 1]]
    for model in (fit_ngrams(1, tokens, vocab_size), fit_ngrams(3, tokens, vocab_size)):
        for context in contexts:
            p = distribution(model, context)
            assert p.sum() == pytest.approx(1, abs=1e-12)
            assert p.min() > 0


def test_every_row_begins_afresh() -> None:
    tokens, vocab_size = DATA["sticky"]
    model = fit_ngrams(3, tokens, vocab_size)
    rows = tokens[:60].reshape(4, 15)
    np.testing.assert_array_equal(model.log_probabilities(rows), [model.log_probabilities(row) for row in rows])


def test_trigram_beats_unigram_where_order_matters_and_not_where_it_does_not() -> None:
    def gap(tokens: np.ndarray, vocab_size: int) -> float:
        train, held_out = tokens[:-2000], tokens[-2000:]
        uni, tri = (fit_ngrams(n, train, vocab_size).log_probabilities(held_out).mean() for n in (1, 3))
        return float(tri - uni)

    assert gap(sticky(20_000, 50, 5), 50) > 1.5
    assert -0.2 < gap(zipf(20_000, 50, 6), 50) < 0.02


def test_packed_file_types_and_the_largest_16_bit_vocabulary() -> None:
    tokens = np.random.default_rng(7).integers(60_000, 65_536, 5000).astype(np.uint16)
    model = fit_ngrams(3, tokens, 65_536)
    wide = fit_ngrams(3, tokens.astype(np.int64), 65_536)
    np.testing.assert_array_equal(model.log_probabilities(tokens), wide.log_probabilities(tokens.astype(np.int64)))
    assert model.log_probabilities(np.zeros(0, np.uint16)).shape == (0,)


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(0.5), 4) == pytest.approx(2)
    with pytest.raises(BraidError, match="at least one byte"):
        bits_per_byte(-1.0, 0)


def test_wrong_input_is_explained() -> None:
    with pytest.raises(BraidError, match="from 0 to 9, but the vocabulary has 9"):
        fit_ngrams(1, np.arange(10), 9)
    with pytest.raises(BraidError, match="from -1"):
        fit_ngrams(1, np.arange(5), 9).log_probabilities(np.array([-1]))
    with pytest.raises(BraidError, match="at least one token"):
        fit_ngrams(3, np.zeros(0, np.uint16), 9)
    with pytest.raises(BraidError, match="too large"):
        fit_ngrams(3, np.arange(3), 1 << 22)
