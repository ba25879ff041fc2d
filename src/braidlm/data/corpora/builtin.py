"""The corpora that Braid generates itself: endless, seeded, and the same on every machine."""

from collections.abc import Callable, Iterator
from itertools import count as count_from

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.corpora.maths import Problem, arithmetic_text, generate_problem, one_step_problem, problem_text
from braidlm.data.corpora.stories import story_text

CORPORA: dict[str, Callable[[int, int], str]] = {
    "stories": story_text,
    "maths": problem_text,
    "arithmetic": arithmetic_text,
}
"""For each corpus the function from a seed and an index to a document."""
PROBLEMS: dict[str, Callable[[int, int], Problem]] = {"maths": generate_problem, "arithmetic": one_step_problem}
"""For corpora of questions and answers the function from a seed and an index to a problem."""


def document(corpus: str, seed: int, index: int) -> str:
    """Document `index` of a corpus; documents do not depend on each other, so workers can share them in any order."""
    return next(documents(corpus, seed, index))


def documents(corpus: str, seed: int, start: int = 0, count: int | None = None) -> Iterator[str]:
    """The documents from `start` on: `count` of them, or endlessly many."""
    if corpus not in CORPORA:
        raise BraidError(f"unknown corpus '{corpus}'.{did_you_mean(corpus, CORPORA)}")
    indices = count_from(start) if count is None else range(start, start + count)
    return (CORPORA[corpus](seed, index) for index in indices)
