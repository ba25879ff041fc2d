"""Long texts in windows: every token predicted exactly once, each from as much as the model can read.

The windows of lm-evaluation-harness (`get_rolling_token_windows` with one token of context): the first begins with a
token of beginning, each further one with the last token before it, and the last is moved back to be a full one.
"""

from collections.abc import Sequence

from braidlm.evals.scoring.forest import Request


def rolling_requests(tokens: Sequence[int], before: int, window: int) -> list[Request]:
    """The tokens of one text, of which `window` are read at once, after the token `before`."""
    found = [Request([before, *tokens[:window]])] if tokens else []
    for start in range(window, len(tokens), window):
        end = min(start + window, len(tokens))
        ids = tokens[end - window - 1 : end]
        found.append(Request(ids, len(ids) - (end - start)))
    return found
