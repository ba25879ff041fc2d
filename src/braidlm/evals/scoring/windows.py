"""Requests longer than a model reads: each token is given as many of those before it as fit.

What must go goes from the beginning, where nothing is scored. Where that is not enough, because what is to be scored is
by itself longer than the context, it is scored in windows, each as long as the context: the first reaches as far as
everything before fits, or half a context into what is scored, and each further one scores the next half a context. So a
token in a later window is given half a context or more, and the sum over all windows is the log-probability of the
whole by the chain rule.
"""

from collections.abc import Sequence

from braidlm.evals.scoring.forest import Request

SHORTENED, IN_WINDOWS = "shortened", "in windows"
"""Keys of a result's notes."""


def windows_of(request: Request, context: int) -> list[Request]:
    """The requests, one or several, that score the same tokens in order and fit into the context."""
    ids, first = request
    over = len(ids) - 1 - context
    if over <= 0:
        return [request]
    if over < first:
        return [Request(ids[over:], first - over)]
    half = max(1, context // 2)
    found = []
    end = max(context + 1, first + half)
    while first < len(ids):
        end = min(end, len(ids))
        begin = end - 1 - context
        found.append(Request(ids[begin:end], first - begin))
        first, end = end, end + half
    return found


def too_long(
    requests: Sequence[Request], context: int | None, items: Sequence[Sequence[int]] | None = None
) -> dict[str, int]:
    """For a result's notes: of how many items (groups of requests; else each is one) a text lost its beginning, and of
    how many one was scored in windows."""
    longest = context if context is None else context + 1
    long = [at for at, request in enumerate(requests) if longest is not None and len(request.ids) > longest]
    in_windows = {at for at in long if len(requests[at].ids) - 1 - (context or 0) >= requests[at].first}
    shortened = set(long) - in_windows
    if items is not None and long:
        owner = {at: index for index, item in enumerate(items) for at in item}
        shortened, in_windows = ({owner[at] for at in some} for some in (shortened, in_windows))
    return {SHORTENED: len(shortened), IN_WINDOWS: len(in_windows)}
