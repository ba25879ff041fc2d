"""Where the options of an item part: only from there on their scores can differ."""

from collections.abc import Sequence

from braidlm.evals.forest import Request


def parted(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of each group (of indices), scored from the first token in which not all of it are alike.

    What they have in common adds the same to all sums, so that the head need not be applied there. That holds for
    options that are scored from the same token on; others stay as they are.
    """
    found = list(requests)
    for group in groups:
        some = [requests[index] for index in group]
        if len({request.first for request in some}) != 1:
            continue
        alike = _alike([request.ids for request in some])
        for index, request in zip(group, some, strict=True):
            found[index] = Request(request.ids, min(max(request.first, alike), len(request.ids)))
    return found


def _alike(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) != 1:
            break
        count += 1
    return count
