"""Where the options of an item part: only from there on their scores can differ."""

from collections.abc import Sequence

from braidlm.evals.scoring.forest import Request


def parted(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of each group (of indices), scored from the first token in which not all of it are alike.

    What they have in common adds the same to all sums, so that the head need not be applied there. That holds for
    options that are scored from the same token on; others stay as they are.
    """
    found = [each if each.first <= len(each.ids) else Request(each.ids, len(each.ids)) for each in requests]
    for group in groups:
        ids, first = found[group[0]]
        begin, alike = ids[:first], len(ids)
        for index in group[1:]:
            other = found[index]
            if other.first != first or other.ids[:first] != begin:
                break
            alike = min(alike, _alike(ids, other.ids, first))
        else:
            for index in group if alike > first else ():
                found[index] = Request(found[index].ids, min(alike, len(found[index].ids)))
    return found


def fitted_alike(requests: Sequence[Request], groups: Sequence[Sequence[int]], context: int | None) -> list[Request]:
    """Requests of groups within a model's context: where one is too long, all of its group lose as much of their
    beginning, so that options are judged after one and the same context (and share it)."""
    found = list(requests)
    if context is None:
        return found
    for group in groups:
        over = max(len(requests[index].ids) for index in group) - 1 - context
        if 0 < over < min(requests[index].first for index in group):
            for index in group:
                found[index] = Request(requests[index].ids[over:], requests[index].first - over)
    return found


def _alike(one: Sequence[int], other: Sequence[int], first: int) -> int:
    """Where two sequences part that have their first tokens in common."""
    most = min(len(one), len(other))
    while first < most and one[first] == other[first]:
        first += 1
    return first
