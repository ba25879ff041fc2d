"""The corpora of word problems: `maths`, and `arithmetic` for the task of that name.

The calculations that `arithmetic` leaves out are for the task, so that a model cannot have read them: which they are
depends on the numbers and the sign alone, whatever the seed, the people or the things.
"""

import hashlib
import re
from dataclasses import dataclass
from itertools import count

from braidlm.data.corpora.material import PEOPLE, cast
from braidlm.data.corpora.problems import KINDS, ONE_STEP, ProblemKind, Scene

HELD_OUT_ONE_IN = 10
_CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) =")


@dataclass(frozen=True)
class Problem:
    """A word problem with its parts."""

    kind: str
    question: str
    solution: str
    answer: int

    @property
    def text(self) -> str:
        return f"Question: {self.question}\nSolution: {self.solution}\nAnswer: {self.answer}"

    @property
    def row(self) -> dict[str, str]:
        """The problem as fields, with the answer as GSM8K states it: after the solution and a mark."""
        return {"question": self.question, "answer": f"{self.solution}\n#### {self.answer}"}


class SmallScene(Scene):
    """A scene whose counts have at most three digits."""

    def size(self) -> int:
        return self.randint(2, self.choice((10, 20, 50, 100)))


def problem_text(seed: int, index: int) -> str:
    """The `maths` corpus: word problems with worked solutions, every equation of which is true."""
    return generate_problem(seed, index).text


def generate_problem(seed: int, index: int) -> Problem:
    """Problem `index` of the endless corpus `maths` with this seed."""
    kind, first, second = cast(seed, index, len(KINDS))
    return _problem(KINDS[kind], Scene(f"maths:{seed}:{index}"), first, second)


def arithmetic_text(seed: int, index: int) -> str:
    """The `arithmetic` corpus: problems of one step with small numbers; a tenth of all calculations is never in it."""
    row = one_step_problem(seed, index).row
    return f"Question: {row['question']}\nAnswer: {row['answer']}"


def one_step_problem(seed: int, index: int, held_out: bool = False) -> Problem:
    """Problem `index` among the problems whose calculation is in the corpus, or among the held-out ones."""
    kind, first, second = cast(seed, index, len(ONE_STEP))
    attempts = (SmallScene(f"arithmetic:{seed}:{index}:{attempt}") for attempt in count())
    problems = (_problem(ONE_STEP[kind], scene, first, second) for scene in attempts)
    return next(problem for problem in problems if is_held_out(problem) == held_out)


def _problem(kind: ProblemKind, scene: Scene, first: int, second: int) -> Problem:
    return Problem(kind.__name__, *kind(scene, PEOPLE[first], PEOPLE[second]))


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
