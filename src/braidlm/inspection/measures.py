"""From choices to numbers: what each layer did, and how well that fits the domains of the texts.

Shapes: T texts, D domains, N choices. A joint table [D, N] counts how often tokens of a domain took a choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from braidlm.inspection.layers import NO_CHOICE, Layer, TokenChoices
from braidlm.inspection.texts import Text

SHUFFLES = 499
"""Permutations of the domains in the permutation test."""
TYPICAL = 8
"""Tokens of each choice that are named."""
NO_DOMAIN = "no domain"
"""The group of texts that have none."""


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts as fractions of their sum along the last dimension; zeros where nothing was counted."""
    total = counts.sum(-1, keepdims=True)
    return counts / np.where(total > 0, total, 1)


def entropy(counts: np.ndarray) -> float:
    """The entropy in bits: 0 when one choice has everything, log2 N when all have the same."""
    p = shares(np.asarray(counts, float))
    p = p[p > 0]
    return max(0.0, float(-(p * np.log2(p)).sum()))


def mutual_information(joint_DN: np.ndarray) -> float:
    """Bits that the choice gives about the domain: 0 when they are independent, H(domain) when it determines it.

    Estimated from counts it is biased upwards, most with few of them: compare it with `information_by_chance`.
    """
    joint = np.asarray(joint_DN, float)
    return max(0.0, entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint.ravel()))


def information_by_chance(counts_TN: np.ndarray, domain_T: Sequence[int], seed: int = 0) -> np.ndarray:
    """The mutual information under SHUFFLES random permutations of the domains among the texts.

    Whole texts are permuted, not tokens, because the tokens of a text are routed alike whatever it is about.
    """
    member_TD = np.eye(max(domain_T) + 1)[np.asarray(domain_T)]
    rng = np.random.default_rng(seed)
    joints = (rng.permutation(member_TD).T @ counts_TN for _ in range(SHUFFLES))
    return np.array([mutual_information(joint) for joint in joints])


def p_value(observed: float, by_chance: np.ndarray) -> float:
    """The p-value of the permutation test; never 0, since the observed order is itself one permutation."""
    return float((1 + (by_chance >= observed - 1e-12).sum()) / (1 + len(by_chance)))


def accuracy(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> float | None:
    """The share of choices that are the right one for their domain; domains without a right one do not count."""
    joint, right = _judged(joint_DN, right_D)
    return float(joint[np.arange(len(right)), right].sum() / joint.sum()) if joint.sum() else None


def accuracy_by_chance(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> float | None:
    """The accuracy of choices with the same frequencies that do not depend on the text."""
    joint, right = _judged(joint_DN, right_D)
    return float(shares(joint.sum(1)) @ shares(joint.sum(0))[right]) if joint.sum() else None


def _judged(joint_DN: np.ndarray, right_D: Sequence[int | None]) -> tuple[np.ndarray, list[int]]:
    judged = np.array([right is not None for right in right_D], dtype=bool)
    return np.asarray(joint_DN, float)[judged], [right for right in right_D if right is not None]


@dataclass
class LayerTally:
    layer: str
    """The address of the layer."""
    decisions: int
    """How many tokens chose."""
    shares: dict[str, float]
    """The share of each choice in all decisions: a token decides for the choice with the largest weight."""
    by_domain: dict[str, dict[str, float]]
    """`shares` over the texts of each domain."""
    load: dict[str, float]
    """The share of each choice in all picks: with top-k each token makes k picks."""
    load_by_domain: dict[str, dict[str, float]]
    weight: dict[str, float]
    """The share of each choice in the router's weights."""
    weight_by_domain: dict[str, dict[str, float]]
    entropy: float
    """The entropy of the load, in bits."""
    judged: int = 0
    """Decisions about texts whose domain has a path here."""
    accuracy: float | None = None
    """The share of judged decisions that are for the domain's path."""
    accuracy_by_chance: float | None = None
    """The accuracy that these shares would give without looking at the text."""
    information: float | None = None
    """The mutual information between domain and choice, in bits; None with less than two domains."""
    information_by_chance: float | None = None
    """The mean information when the domains are permuted at random among the texts."""
    p_value: float | None = None
    domain_entropy: float | None = None
    """The upper bound of the information, in bits."""


@dataclass
class Tally:
    """All layers, over one set of decisions."""

    what: str
    """Which decisions are counted."""
    decisions: int
    """Over all layers that choose between paths; of a model without paths, over all."""
    shares: dict[str, float]
    """The share of each path over those layers; empty without paths, since layers have different experts."""
    accuracy: float | None
    accuracy_by_chance: float | None
    layers: list[LayerTally | None] = field(default_factory=list)
    """In the model's order; None where a layer cannot be read."""

    @property
    def read(self) -> list[LayerTally]:
        return [layer for layer in self.layers if layer is not None]

    @property
    def most_informative(self) -> LayerTally | None:
        """The layer whose choices have most information about the domain; None with fewer than two domains."""
        known = [layer for layer in self.read if layer.information is not None]
        return max(known, key=lambda layer: layer.information or 0.0, default=None)


def tally(
    what: str,
    layers: Sequence[Layer],
    texts: Sequence[Text],
    choices: Sequence[TokenChoices],
    right: Mapping[str, str | None],
) -> Tally:
    """Count what each text's tokens chose, and compare it with the path that is `right` for each domain."""
    tallies = [_tally_layer(one, n, texts, choices, right) if one.read_by else None for n, one in enumerate(layers)]
    read = [one for one in tallies if one is not None]
    of_paths = [one for layer, one in zip(layers, tallies, strict=True) if one is not None and layer.of_paths]
    total = sum(one.decisions for one in of_paths or read)
    names = dict.fromkeys(name for one in of_paths for name in one.shares)
    pooled = {name: sum(one.shares.get(name, 0.0) * one.decisions for one in of_paths) / total for name in names}
    return Tally(what, total, pooled, _judged_mean(read, "accuracy"), _judged_mean(read, "accuracy_by_chance"), tallies)


def counts_of(choices: np.ndarray, size: int, weights: np.ndarray | None = None) -> np.ndarray:
    """How often each of `size` choices was taken, or the sum of its `weights`."""
    known = choices != NO_CHOICE
    return np.bincount(choices[known], None if weights is None else weights[known], minlength=size)


def named_shares(counts: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Shares under the choices' names."""
    return {name: float(share) for name, share in zip(names, shares(counts), strict=True)}


def typical_tokens(texts: Sequence[Text], choices: Sequence[TokenChoices], index: int, size: int) -> list[list[int]]:
    """For each of a layer's `size` choices the token ids that took it most often beyond chance, the first ones first.

    Chance is what the frequencies of tokens and of choices would give if they were independent.
    """
    ids_T = np.concatenate([np.asarray(text.ids) for text in texts])
    chosen_KT = np.concatenate([one.chosen_LKT[index] for one in choices], axis=-1)
    tokens, token_T = np.unique(ids_T, return_inverse=True)
    known_KT = chosen_KT != NO_CHOICE
    pairs = chosen_KT[known_KT].astype(np.int64) * len(tokens) + np.broadcast_to(token_T, chosen_KT.shape)[known_KT]
    joint_NV = np.bincount(pairs, minlength=size * len(tokens)).reshape(size, -1).astype(float)
    excess_NV = joint_NV - joint_NV.sum(1, keepdims=True) * shares(joint_NV.sum(0))
    order_NV = np.argsort(-excess_NV, axis=1, kind="stable")[:, :TYPICAL]
    return [[int(tokens[at]) for at in row if excess_NV[n, at] > 0] for n, row in enumerate(order_NV)]


def _tally_layer(
    layer: Layer, index: int, texts: Sequence[Text], choices: Sequence[TokenChoices], right: Mapping[str, str | None]
) -> LayerTally:
    names, size = layer.choices, len(layer.choices)
    groups = [text.domain or NO_DOMAIN for text in texts]

    def summed(counts_TN: np.ndarray) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """The shares over all texts, and over the texts of each group."""
        members = {group: [each == group for each in groups] for group in dict.fromkeys(groups)}
        by_group = {group: named_shares(counts_TN[rows].sum(0), names) for group, rows in members.items()}
        return named_shares(counts_TN.sum(0), names), by_group

    counts_TN = np.array([counts_of(one.main_LT[index], size) for one in choices])
    picks_TN = np.array([counts_of(one.chosen_LKT[index], size) for one in choices])
    weights_TN = np.array([counts_of(one.chosen_LKT[index], size, one.weights_LKT[index]) for one in choices])
    counted = (*summed(counts_TN), *summed(picks_TN), *summed(weights_TN))
    layer_tally = LayerTally(layer.name, int(counts_TN.sum()), *counted, entropy(picks_TN.sum(0)))
    domains = [group for group in dict.fromkeys(groups) if group != NO_DOMAIN]
    if not domains:
        return layer_tally
    joint_DN = np.array([counts_TN[[group == domain for group in groups]].sum(0) for domain in domains])
    targets = [names.index(path) if (path := right.get(domain)) in names else None for domain in domains]
    judged = [counts.sum() for counts, target in zip(joint_DN, targets, strict=True) if target is not None]
    layer_tally.judged = int(sum(judged))
    layer_tally.accuracy = accuracy(joint_DN, targets)
    layer_tally.accuracy_by_chance = accuracy_by_chance(joint_DN, targets)
    if len(domains) > 1:
        known = [at for at, group in enumerate(groups) if group != NO_DOMAIN]
        by_chance = information_by_chance(counts_TN[known], [domains.index(groups[at]) for at in known])
        layer_tally.information = mutual_information(joint_DN)
        layer_tally.information_by_chance = float(by_chance.mean())
        layer_tally.p_value = p_value(layer_tally.information, by_chance)
        layer_tally.domain_entropy = entropy(joint_DN.sum(1))
    return layer_tally


def _judged_mean(layers: Sequence[LayerTally], key: str) -> float | None:
    """The mean over all decisions that have a right choice."""
    judged = sum(layer.judged for layer in layers)
    return sum(getattr(layer, key) * layer.judged for layer in layers if layer.judged) / judged if judged else None
