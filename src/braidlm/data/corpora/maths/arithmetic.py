"""The `arithmetic` corpus: word problems of one step with small numbers; a tenth of all calculations is never in it.

The calculations that are left out are for the task of the same name, so that a model cannot have read them: which they
are depends on the numbers and the sign alone, whatever the seed, the people or the things.
"""

import hashlib
import re
from itertools import count

from braidlm.data.corpora.maths.counting import at_first, give, groups, more, share, together
from braidlm.data.corpora.maths.generator import Problem
from braidlm.data.corpora.maths.scene import PEOPLE, ProblemKind, Scene
from braidlm.data.corpora.rng import Rng, spread

ONE_STEP: tuple[ProblemKind, ...] = (together, more, give, at_first, groups, share)
HELD_OUT_ONE_IN = 10

_SIZES = (len(ONE_STEP), len(PEOPLE), len(PEOPLE) - 1)
_CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) =")


class SmallScene(Scene):
    """A scene whose counts have at most three digits."""

    __slots__ = ()

    def size(self) -> int:
        return self.randint(2, self.choice((10, 20, 50, 100)))


def arithmetic_text(seed: int, index: int) -> str:
    """Problem `index` of the endless corpus with this seed, as a question with its answer."""
    row = arithmetic_row(seed, index)
    return f"Question: {row['question']}\nAnswer: {row['answer']}"


def arithmetic_row(seed: int, index: int) -> dict[str, str]:
    """Problem `index` as the fields question and answer."""
    return one_step_problem(seed, index, held_out=False).row


def one_step_problem(seed: int, index: int, held_out: bool) -> Problem:
    """Problem `index` of those whose calculation is in the corpus, or of those whose calculation is held out."""
    kind_index, first, second = spread(seed, index, _SIZES)
    kind = ONE_STEP[kind_index]
    for attempt in count():
        rng = Rng(f"arithmetic:{seed}:{index}:{attempt}")
        problem = Problem(kind.__name__, *kind(SmallScene(rng, PEOPLE[first], PEOPLE[second + (second >= first)])))
        if is_held_out(problem) == held_out:
            return problem
    raise AssertionError("attempts are endless")


def is_held_out(problem: Problem) -> bool:
    """Whether the corpus leaves out this calculation; 3 + 4 is the same as 4 + 3."""
    digest = hashlib.sha256(calculation(problem).encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0


def calculation(problem: Problem) -> str:
    """What is calculated, the smaller number first where the order does not matter."""
    match = _CALCULATION.search(problem.solution)
    assert match is not None, "every solution calculates something"
    x, sign, y = match.groups()
    if sign in "+*":
        x, y = sorted((x, y), key=int)
    return f"{x} {sign} {y}"
