"""Measures of who goes where: pure functions of counts.

Shapes: T texts, D domains, N choices. A joint table [D, N] counts how often tokens of a domain took a choice.
"""

from collections.abc import Sequence

import numpy as np

SHUFFLES = 499
"""Times that domains are dealt out anew to say what chance alone would give."""


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts as parts of 1 along the last dimension; zeros where nothing was counted."""
    total = counts.sum(-1, keepdims=True)
    return counts / np.where(total > 0, total, 1)


def entropy(counts: np.ndarray) -> float:
    """In bits: 0 when one choice has everything, log2 N when all have the same."""
    part = shares(np.asarray(counts, float))
    part = part[part > 0]
    return max(0.0, float(-(part * np.log2(part)).sum()))


def mutual_information(joint_DN: np.ndarray) -> float:
    """How many bits the choice tells about the domain: 0 when they are independent, H(domain) when it tells all.

    Measured on counts it is too high on average, most with few of them: compare it with `information_by_chance`.
    """
    joint = np.asarray(joint_DN, float)
    told = entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint.ravel())
    return max(0.0, told)


def information_by_chance(counts_TN: np.ndarray, domain_T: Sequence[int], seed: int = 0) -> np.ndarray:
    """The mutual information of SHUFFLES rounds in which the same domains are dealt at random among the same texts.

    Whole texts are dealt, not tokens, because the tokens of a text go similar ways whatever it is about.
    """
    member_TD = np.eye(max(domain_T) + 1)[np.asarray(domain_T)]
    dice = np.random.default_rng(seed)
    rounds = (dice.permutation(member_TD).T @ counts_TN for _ in range(SHUFFLES))
    return np.array([mutual_information(joint) for joint in rounds])


def luck(found: float, by_chance: np.ndarray) -> float:
    """How probable it is that chance alone gives as much; never 0, since what was found is itself one deal."""
    return float((1 + (by_chance >= found - 1e-12).sum()) / (1 + len(by_chance)))


def accuracy(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> float | None:
    """The share of choices that are the right one for their domain; domains without a right one do not count."""
    joint, right = _judged(joint_DN, right_D)
    return float(joint[np.arange(len(right)), right].sum() / joint.sum()) if joint.sum() else None


def accuracy_by_chance(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> float | None:
    """How often choices made just as often, but without a look at the text, would be right."""
    joint, right = _judged(joint_DN, right_D)
    return float(shares(joint.sum(1)) @ shares(joint.sum(0))[right]) if joint.sum() else None


def _judged(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> tuple[np.ndarray, list[int]]:
    kept = [(row, right) for row, right in zip(np.asarray(joint_DN, float), right_D, strict=True) if right is not None]
    return np.array([row for row, _ in kept]), [right for _, right in kept]
