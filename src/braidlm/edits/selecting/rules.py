"""The rules by which gates stay or go, by how each changes the perplexity of its layer's output."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Rule = Literal["smallest-change", "only-if-helps", "as_printed"]

SCORES: dict[str, Callable[[float], float]] = {
    "smallest-change": abs,
    "only-if-helps": lambda change: -change,
    "as_printed": lambda change: change,
}
"""By a rule's name, what a change of the perplexity's logarithm counts in favour of a gate."""
THRESHOLDS: dict[str, float] = {"smallest-change": 0.1, "only-if-helps": 0.0, "as_printed": 0.0}
"""Of each rule, unless another is given: the share of the largest score above which gates stay."""
WORDS: dict[str, str] = {
    "smallest-change": "changes the perplexity",
    "only-if-helps": "lowers the perplexity",
    "as_printed": "raises the perplexity",
}
"""What a rule wants of a gate that stays."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one gate."""

    layer: int
    stays: bool
    reason: str

    @property
    def word(self) -> str:
        return "stays" if self.stays else "goes"


def judge(
    changes: Mapping[int, float], rule: Rule, keep: int | None = None, threshold: float | None = None
) -> list[Verdict]:
    """What becomes of the gate of each layer, by the change of the perplexity's logarithm that it makes there.

    Those stay whose score is above zero and above `threshold` times the largest; or, of those above zero, the `keep`
    with the largest.
    """
    scores = {layer: SCORES[rule](change) for layer, change in changes.items()}
    share = 0.0 if keep is not None else THRESHOLDS[rule] if threshold is None else threshold
    limit = share * max([0.0, *scores.values()])
    above = sorted((layer for layer, score in scores.items() if score > limit), key=lambda layer: -scores[layer])
    kept = above[:keep]
    return [Verdict(layer, layer in kept, _reason(layer, rule, scores[layer], limit, above, keep)) for layer in scores]


def _reason(layer: int, rule: Rule, score: float, limit: float, above: Sequence[int], keep: int | None) -> str:
    if score == 0:
        return "changes nothing"
    if layer not in above:
        verb = _infinitive(WORDS[rule])
        return f"does not {verb} by more than {limit:.4f}" if limit and score > 0 else f"does not {verb}"
    if keep is None:
        return WORDS[rule]
    rank = above.index(layer) + 1
    return f"{WORDS[rule]}, rank {rank} of {len(above)}" + ("" if rank <= keep else f": not among the first {keep}")


def _infinitive(words: str) -> str:
    verb, _, rest = words.partition(" ")
    return f"{verb.removesuffix('s')} {rest}"
