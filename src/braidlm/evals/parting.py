"""Where the options of an item part: only from there on their scores can differ."""

from collections.abc import Sequence

from braidlm.evals.forest import Request


def parted(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of each group (of indices), scored from the first token in which not all of it are alike.

    What they have in common adds the same to all sums, so that the head need not be applied there. That holds for
    options that are scored from the same token on; others stay as they are.
    """
    found = [Request(request.ids, min(request.first, len(request.ids))) for request in requests]
    for group in groups:
        some = [found[index] for index in group]
        first = some[0].first
        begin = some[0].ids[:first]
        if any(request.first != first or request.ids[:first] != begin for request in some[1:]):
            continue
        alike = first + _alike([request.ids[first:] for request in some])
        for index, request in zip(group, some, strict=True):
            found[index] = Request(request.ids, min(alike, len(request.ids)))
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


def _alike(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) != 1:
            break
        count += 1
    return count
