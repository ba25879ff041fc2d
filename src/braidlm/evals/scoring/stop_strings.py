"""Stop strings: where generated text ends."""

from collections.abc import Sequence


def truncate_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    starts = [start for start in map(text.find, stops) if start >= 0]
    return text[: min(starts)] if starts else text


def contains_any(text: str, stops: Sequence[str]) -> bool:
    """Whether one of the stop strings is in the text."""
    return any(stop in text for stop in stops)
