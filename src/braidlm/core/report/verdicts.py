"""The verdict of a report that compares: what was compared, which is best, by how much, and how sure that is."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev, variance

CLEAR = 2.0
"""A difference of more than this many of its standard errors is called clear."""
EQUAL = 0.02
"""Single scores that differ by less than this share count as equal: another seed moves them as far."""


def ranking(scores: Mapping[str, Sequence[float]], compared: str, what: str = "bits per byte") -> str:
    """The lowest of {name: its scores with each seed} and the next, then whether seeds would explain the difference."""
    known = {name: each for name, each in scores.items() if each and all(map(math.isfinite, each))}
    best, *others = sorted(known, key=lambda name: mean(known[name])) or [""]
    if not others:
        only = f"{best} has {spread(known[best], 4)} {what}" if best else f"No {what} are known"
        return f"{only}; there is nothing to compare it with."
    first, second = known[best], known[others[0]]
    gap = mean(second) - mean(first)
    share = gap / abs(mean(second)) if mean(second) else 0.0
    if min(len(first), len(second)) > 1:
        error = math.sqrt(variance(first) / len(first) + variance(second) / len(second))
        is_clear = gap > CLEAR * error
        of_seeds = str(len(first)) if len(first) == len(second) else f"{len(first)} and {len(second)}"
        sure = f"over {of_seeds} seeds the difference is {gap:.4f} ± {error:.4f} (standard error)"
        sure += ": clear" if is_clear else ", which may be chance"
    else:
        is_clear = share >= EQUAL
        sure = "one seed each" if len(first) == len(second) else "one of the two has one seed"
        sure += ", so how far seeds move scores is not known" if is_clear else ", and another could turn it round"
    of = f"of {len(known)} {compared}"
    won = f"{best} is the best {of}, with" if is_clear else f"No clear winner {of}: {best} has"
    return (
        f"{won} {spread(first, 4)} {what}, {share:.1%} less than the next, {others[0]} ({spread(second, 4)}).\n\n"
        f"How sure: {sure}."
    )


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """The mean over seeds, and where there are several the deviation of the sample; `+` is the sign of changes."""
    text = f"{mean(values):{sign}.{digits}f}".replace("-", "−")
    return text if len(values) == 1 else f"{text} ± {stdev(values):.{digits}f}"
