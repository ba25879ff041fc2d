"""The `maths` corpus: word problems with worked solutions, every equation of which is true."""

from dataclasses import dataclass

from braidlm.data.corpora.maths.counting import COUNTING
from braidlm.data.corpora.maths.measures import MEASURES
from braidlm.data.corpora.maths.scene import PEOPLE, ProblemKind, Scene
from braidlm.data.corpora.rng import Rng, spread

KINDS: tuple[ProblemKind, ...] = COUNTING + MEASURES

_SIZES = (len(KINDS), len(PEOPLE), len(PEOPLE) - 1)


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


def problem_text(seed: int, index: int) -> str:
    """Problem `index` of the endless corpus with this seed."""
    return generate_problem(seed, index).text


def generate_problem(seed: int, index: int) -> Problem:
    """Problem `index` with its parts."""
    # The kind and both people show in every problem, so neighbours differ for certain; all else is random.
    kind_index, first, second = spread(seed, index, _SIZES)
    kind = KINDS[kind_index]
    scene = Scene(Rng(f"maths:{seed}:{index}"), PEOPLE[first], PEOPLE[second + (second >= first)])
    return Problem(kind.__name__, *kind(scene))
