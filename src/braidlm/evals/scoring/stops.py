"""Stop strings: where a text that a model writes ends."""

from collections.abc import Sequence


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    places = [place for place in map(text.find, stops) if place >= 0]
    return text[: min(places)] if places else text


def has_any(text: str, stops: Sequence[str]) -> bool:
    """Whether one of the stops is in the text."""
    return any(stop in text for stop in stops)
