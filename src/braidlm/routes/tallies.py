"""From choices to numbers: what each layer did, and how well that fits the domains of the texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from braidlm.routes.collect import UNREAD, Layer, Taken
from braidlm.routes.measures import (
    accuracy,
    accuracy_by_chance,
    entropy,
    information_by_chance,
    luck,
    mutual_information,
    shares,
)
from braidlm.routes.texts import Text

NO_DOMAIN = "no domain"
"""How texts are called together that have none."""


@dataclass
class LayerTally:
    """What one layer chose."""

    layer: str
    """Its address."""
    decisions: int
    """Tokens that chose."""
    shares: dict[str, float]
    """Of all decisions, by choice: the one that counts most for a token."""
    by_domain: dict[str, dict[str, float]]
    """The same for each domain's texts apart."""
    load: dict[str, float]
    """Of all picks, by choice: top-k of N makes k of them for each token."""
    load_by_domain: dict[str, dict[str, float]]
    weight: dict[str, float]
    """Of all weights, by choice: what it counts in what comes out."""
    weight_by_domain: dict[str, dict[str, float]]
    entropy: float
    """Of the load, in bits."""
    judged: int = 0
    """Decisions about texts whose domain has a path here."""
    accuracy: float | None = None
    """The share of them for that path."""
    accuracy_by_chance: float | None = None
    """What the same shares would give without a look at the text."""
    information: float | None = None
    """Between domain and choice, in bits; None with less than two domains."""
    information_by_chance: float | None = None
    """Its mean when the domains are dealt at random among the texts."""
    luck: float | None = None
    """How probable it is that such a deal gives as much information as was found."""
    domain_entropy: float | None = None
    """The most it could be, in bits."""


@dataclass
class Tally:
    """All layers, looked at in one way."""

    what: str
    """Which decisions are counted."""
    decisions: int
    """Over all layers that choose between paths; of a model without paths, over all."""
    shares: dict[str, float]
    """Of the paths over those layers; empty for a model without paths: each layer's experts are others."""
    accuracy: float | None
    accuracy_by_chance: float | None
    layers: list[LayerTally | None] = field(default_factory=list)
    """In the order of the model's; None where a layer cannot be read."""

    @property
    def read(self) -> list[LayerTally]:
        """The layers that can be read."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def telling(self) -> LayerTally | None:
        """The layer whose choices tell most about the domain; None where domains are not known or only one."""
        known = [layer for layer in self.read if layer.information is not None]
        return max(known, key=lambda layer: layer.information or 0.0, default=None)


def tally(
    what: str,
    layers: Sequence[Layer],
    texts: Sequence[Text],
    taken: Sequence[Taken],
    right: Mapping[str, str | None],
) -> Tally:
    """Count what each text's tokens took against the path that is `right` for each domain."""
    tallies = [
        _tally_layer(layer, index, texts, taken, right) if layer.how else None for index, layer in enumerate(layers)
    ]
    read = [one for one in tallies if one is not None]
    of_paths = [one for layer, one in zip(layers, tallies, strict=True) if one is not None and layer.of_paths]
    total = sum(one.decisions for one in of_paths or read)
    names = dict.fromkeys(name for one in of_paths for name in one.shares)
    pooled = {name: sum(one.shares.get(name, 0.0) * one.decisions for one in of_paths) / total for name in names}
    return Tally(what, total, pooled, _judged_mean(read, "accuracy"), _judged_mean(read, "accuracy_by_chance"), tallies)


def counts_of(choices: np.ndarray, size: int, weights: np.ndarray | None = None) -> np.ndarray:
    """How often each of `size` choices was taken, or what its `weights` add up to."""
    known = choices != UNREAD
    return np.bincount(choices[known], None if weights is None else weights[known], minlength=size)


def named_shares(counts: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Shares under the choices' names."""
    return {name: float(share) for name, share in zip(names, shares(counts), strict=True)}


def load_of(taken: Sequence[Taken], index: int, size: int) -> np.ndarray:
    """How often each of a layer's `size` choices was picked."""
    return np.sum([counts_of(one.picks_LKT[index], size) for one in taken], axis=0)


def _tally_layer(
    layer: Layer, index: int, texts: Sequence[Text], taken: Sequence[Taken], right: Mapping[str, str | None]
) -> LayerTally:
    names, size = layer.choices, len(layer.choices)
    counts_TN = np.array([counts_of(one.main_LT[index], size) for one in taken])
    picks_TN = np.array([counts_of(one.picks_LKT[index], size) for one in taken])
    weights_TN = np.array([counts_of(one.picks_LKT[index], size, one.weights_LKT[index]) for one in taken])
    groups = [text.domain or NO_DOMAIN for text in texts]
    joint, load, weight = (_by_group(counted, groups) for counted in (counts_TN, picks_TN, weights_TN))
    made = LayerTally(
        layer=layer.name,
        decisions=int(counts_TN.sum()),
        shares=named_shares(counts_TN.sum(0), names),
        by_domain={group: named_shares(counts, names) for group, counts in joint.items()},
        load=named_shares(picks_TN.sum(0), names),
        load_by_domain={group: named_shares(counts, names) for group, counts in load.items()},
        weight=named_shares(weights_TN.sum(0), names),
        weight_by_domain={group: named_shares(sums, names) for group, sums in weight.items()},
        entropy=entropy(picks_TN.sum(0)),
    )
    domains = [group for group in joint if group != NO_DOMAIN]
    if not domains:
        return made
    joint_DN = np.array([joint[domain] for domain in domains])
    targets = [_index(names, right.get(domain)) for domain in domains]
    made.judged = int(sum(counts.sum() for counts, target in zip(joint_DN, targets, strict=True) if target is not None))
    made.accuracy, made.accuracy_by_chance = accuracy(joint_DN, targets), accuracy_by_chance(joint_DN, targets)
    if len(domains) > 1:
        known = [(domains.index(group), row) for group, row in zip(groups, counts_TN, strict=True) if group in domains]
        by_chance = information_by_chance(np.array([r for _, r in known]), [d for d, _ in known])
        made.information = mutual_information(joint_DN)
        made.information_by_chance, made.luck = float(by_chance.mean()), luck(made.information, by_chance)
        made.domain_entropy = entropy(joint_DN.sum(1))
    return made


def _by_group(counted_TN: np.ndarray, groups: Sequence[str]) -> dict[str, np.ndarray]:
    """Summed over the texts of each group."""
    return {group: counted_TN[[g == group for g in groups]].sum(0) for group in dict.fromkeys(groups)}


def _index(names: Sequence[str], name: str | None) -> int | None:
    return names.index(name) if name in names else None  # type: ignore[arg-type]


def _judged_mean(layers: Sequence[LayerTally], key: str) -> float | None:
    """Over all decisions that have a right one."""
    judged = sum(layer.judged for layer in layers)
    return sum(getattr(layer, key) * layer.judged for layer in layers if layer.judged) / judged if judged else None
