"""The corpora that Braid makes itself: endless, seeded, and the same on every machine."""

from collections.abc import Callable, Iterator
from itertools import count as count_from

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.corpora.maths import problem
from braidlm.data.corpora.stories import story

CORPORA: dict[str, Callable[[int, int], str]] = {"stories": story, "maths": problem}
"""What makes a corpus: document number `index` for a seed, from these two alone."""


def document(corpus: str, seed: int, index: int) -> str:
    """Document `index` of a corpus; each can be computed on its own, so cores can share the work in any order."""
    return _maker(corpus)(seed, index)


def documents(corpus: str, seed: int, start: int = 0, count: int | None = None) -> Iterator[str]:
    """The documents from `start` on: `count` of them, or without end."""
    maker = _maker(corpus)
    indices = count_from(start) if count is None else range(start, start + count)
    return (maker(seed, index) for index in indices)


def _maker(corpus: str) -> Callable[[int, int], str]:
    if corpus not in CORPORA:
        raise BraidError(f"unknown corpus '{corpus}'.{did_you_mean(corpus, CORPORA)}")
    return CORPORA[corpus]
