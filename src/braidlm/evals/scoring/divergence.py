"""Where the options of an item diverge: only from there on can their scores differ."""

from collections.abc import Sequence

from braidlm.evals.scoring.requests import Request


def from_divergence(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of each group (of indices), scored from the first token in which they are not all equal.

    A common prefix adds the same to all sums, so that the head need not be applied there. This holds for options that
    are scored from the same token on; others stay as they are.
    """
    diverging = [each if each.first <= len(each.ids) else Request(each.ids, len(each.ids)) for each in requests]
    for group in groups:
        ids, first = diverging[group[0]]
        prefix, common = ids[:first], len(ids)
        for index in group[1:]:
            other = diverging[index]
            if other.first != first or other.ids[:first] != prefix:
                break
            common = min(common, _common_length(ids, other.ids, first))
        else:
            for index in group if common > first else ():
                diverging[index] = Request(diverging[index].ids, min(common, len(diverging[index].ids)))
    return diverging


def truncate_alike(requests: Sequence[Request], groups: Sequence[Sequence[int]], context: int | None) -> list[Request]:
    """Requests within a model's context: where one of a group is too long, all of the group lose as many tokens at the
    beginning, so that all options are scored after the same context (and share it)."""
    truncated = list(requests)
    if context is None:
        return truncated
    for group in groups:
        excess = max(len(requests[index].ids) for index in group) - 1 - context
        if 0 < excess < min(requests[index].first for index in group):
            for index in group:
                truncated[index] = Request(requests[index].ids[excess:], requests[index].first - excess)
    return truncated


def _common_length(one: Sequence[int], other: Sequence[int], first: int) -> int:
    """The length of the common prefix of two sequences whose first tokens are known to be equal."""
    shorter = min(len(one), len(other))
    while first < shorter and one[first] == other[first]:
        first += 1
    return first
