"""Unigram and trigram models over token ids: the baselines of a trained model.

Interpolated modified Kneser-Ney (Chen and Goodman, 1999): the highest order counts how often an n-gram occurs, each
lower order counts how many different tokens precede it, every count is discounted (one discount each for counts of 1,
2, and 3 or more), and the discounted mass of a context is distributed by the next shorter context, the last by the
uniform distribution. An n-gram is one uint64, its tokens the digits in base `vocab_size`, so that counting is a sort.
"""

from dataclasses import dataclass

import numpy as np

from braidlm.core.errors import BraidError

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Used (as KenLM does) where counts of 1 to 4 are too rare to estimate discounts from, as in very small data or where
every token is frequent."""


@dataclass(frozen=True)
class Level:
    """The n-grams of one order: discounted counts, and the discounted mass of their contexts."""

    order: int
    discounts: tuple[float, float, float]
    keys: np.ndarray
    """[n-grams] uint64, sorted."""
    discounted: np.ndarray
    """[n-grams] counts after the discount."""
    contexts: np.ndarray
    """[contexts] uint64, sorted."""
    totals: np.ndarray
    """[contexts] sum of the counts before the discount."""
    backoff_mass: np.ndarray
    """[contexts] sum of the discounts: with the discounted counts it is the total, so probabilities sum to 1."""

    def mix(self, keys: np.ndarray, contexts: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """The probabilities of this order, from the probabilities of the order below, which unseen contexts keep."""
        discounted = _look_up(self.keys, self.discounted, keys)
        total, backoff_mass = (_look_up(self.contexts, sums, contexts) for sums in (self.totals, self.backoff_mass))
        seen = total > 0
        return np.where(seen, (discounted + backoff_mass * lower) / np.where(seen, total, 1.0), lower)


@dataclass(frozen=True)
class NGramModel:
    """An interpolated modified Kneser-Ney model; `levels` from the unigrams up."""

    vocab_size: int
    levels: tuple[Level, ...]

    def log_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Natural log-probability of every token given those before it on the last axis, [..., time].

        The first tokens have shorter contexts; every row of a two-dimensional array is a separate text.
        """
        digits = _checked(tokens, self.vocab_size)
        probability = np.full(digits.shape, 1.0 / self.vocab_size)
        for level in self.levels:
            if digits.shape[-1] < level.order:
                break
            keys = _pack(digits, level.order, self.vocab_size)
            covered = (..., slice(level.order - 1, None))
            probability[covered] = level.mix(keys, keys // np.uint64(self.vocab_size), probability[covered])
        return np.log(probability)


def fit_ngrams(order: int, tokens: np.ndarray, vocab_size: int) -> NGramModel:
    """The model of an order: 1 for the frequency of each token, 3 for each token given the two before it; smoothed."""
    if vocab_size**order > 1 << 64:
        raise BraidError(f"a vocabulary of {vocab_size:,} is too large for {order}-grams of 64 bits")
    digits = _checked(tokens, vocab_size)
    if digits.ndim != 1 or not digits.size:
        raise BraidError("an n-gram model needs at least one token to learn from", "training data")
    keys, counts = np.unique(_pack(digits, order, vocab_size), return_counts=True)
    levels = [_level(order, keys, counts, vocab_size)]
    for lower in range(order - 1, 0, -1):
        # The distinct n-grams one order up; dropping their first token leaves one entry per different predecessor.
        distinct = keys if lower == order - 1 else np.unique(_pack(digits, lower + 1, vocab_size))
        continuations = np.unique(distinct % np.uint64(vocab_size**lower), return_counts=True)
        levels.insert(0, _level(lower, *continuations, vocab_size))
    return NGramModel(vocab_size, tuple(levels))


def _level(order: int, keys: np.ndarray, counts: np.ndarray, vocab_size: int) -> Level:
    discounts = _discounts(counts)
    discount = np.array((0.0, *discounts))[np.minimum(counts, 3)]
    # Keys are sorted and a context is a key without its last digit, so each context's n-grams are neighbours.
    contexts, starts = np.unique(keys // np.uint64(vocab_size), return_index=True)
    totals, backoff_mass = (np.add.reduceat(each, starts) for each in (counts.astype(np.float64), discount))
    return Level(order, discounts, keys, counts - discount, contexts, totals, backoff_mass)


def _discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Chen and Goodman's estimates from how many n-grams occur once, twice, three and four times."""
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    if not (n1 and n2 and n3 and n4):
        return FALLBACK_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # A discount must leave every count positive and every context some mass to distribute.
    valid = all(0 < discount < count for count, discount in enumerate(estimates, start=1))
    return estimates if valid else FALLBACK_DISCOUNTS


def _pack(digits: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Every run of `order` tokens along the last axis as one number: [..., time - order + 1]."""
    length = max(digits.shape[-1] - order + 1, 0)
    keys = np.zeros((*digits.shape[:-1], length), np.uint64)
    for offset in range(order):
        keys *= np.uint64(vocab_size)
        keys += digits[..., offset : offset + length]
    return keys


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The value of each key, 0 where it is not there."""
    if not keys.size:
        return np.zeros(queries.shape)
    at = np.minimum(np.searchsorted(keys, queries), keys.size - 1)
    return np.where(keys[at] == queries, values[at], 0.0)


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        what = f"token ids run from {tokens.min()} to {tokens.max()}, but the vocabulary has {vocab_size}"
        raise BraidError(what, "n-gram model", "Use the tokenizer that made the tokens.")
    return tokens.astype(np.uint64)
