"""Requests and texts that are longer than a model's context, scored in windows.

A request that is too long is truncated at the beginning, where nothing is scored. Where that is not enough, because the
scored tokens alone exceed the context, it is scored in windows of the context's length: the first window reaches as far
as all of the context before it fits, or half a context into the scored tokens, and each further one scores the next
half a context. So a token in a later window is given half a context or more, and the sum over all windows is the
log-probability of the whole by the chain rule.
"""

from collections.abc import Sequence

from braidlm.evals.scoring.requests import Request

SHORTENED, IN_WINDOWS = "shortened", "in windows"
"""Keys of a result's notes."""


def windows_of(request: Request, context: int) -> list[Request]:
    """The requests, one or several, that score the same tokens in order and fit into the context."""
    ids, first = request
    excess = len(ids) - 1 - context
    if excess <= 0:
        return [request]
    if excess < first:
        return [Request(ids[excess:], first - excess)]
    half = max(1, context // 2)
    windows = []
    end = max(context + 1, first + half)
    while first < len(ids):
        end = min(end, len(ids))
        begin = end - 1 - context
        windows.append(Request(ids[begin:end], first - begin))
        first, end = end, end + half
    return windows


def sliding_windows(tokens: Sequence[int], before: int, window: int) -> list[Request]:
    """A long text of which `window` tokens are read at once: every token is predicted exactly once.

    These are the windows of lm-evaluation-harness (`get_rolling_token_windows` with one token of context): the first
    begins with the token `before`, each further one with the last token before it, and the last is moved back to be a
    full one.
    """
    windows = [Request([before, *tokens[:window]])] if tokens else []
    for start in range(window, len(tokens), window):
        end = min(start + window, len(tokens))
        ids = tokens[end - window - 1 : end]
        windows.append(Request(ids, len(ids) - (end - start)))
    return windows


def too_long(
    requests: Sequence[Request], context: int | None, items: Sequence[Sequence[int]] | None = None
) -> dict[str, int]:
    """For a result's notes: of how many items (groups of requests; else each is one) a text was truncated, and of how
    many one was scored in windows."""
    long = [] if context is None else [at for at, request in enumerate(requests) if len(request.ids) > context + 1]
    in_windows = {at for at in long if len(requests[at].ids) - 1 - (context or 0) >= requests[at].first}
    shortened = set(long) - in_windows
    if items is not None and long:
        owner = {at: index for index, item in enumerate(items) for at in item}
        shortened, in_windows = ({owner[at] for at in some} for some in (shortened, in_windows))
    return {SHORTENED: len(shortened), IN_WINDOWS: len(in_windows)}
