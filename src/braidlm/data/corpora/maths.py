"""The `maths` corpus: word problems with worked solutions, every equation of which is true."""

from dataclasses import dataclass

from braidlm.data.corpora.maths_counting import COUNTING
from braidlm.data.corpora.maths_measures import MEASURES
from braidlm.data.corpora.maths_scene import PEOPLE, Kind, Scene
from braidlm.data.corpora.rng import Dice, spread

KINDS: tuple[Kind, ...] = COUNTING + MEASURES

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


def problem(seed: int, index: int) -> str:
    """Problem `index` of the endless corpus with this seed."""
    return pose(seed, index).text


def pose(seed: int, index: int) -> Problem:
    """A problem with its parts."""
    # The kind and both people show in every problem, so neighbours differ for certain; all else is chance.
    which, first, second = spread(seed, index, _SIZES)
    kind = KINDS[which]
    scene = Scene(Dice(f"maths:{seed}:{index}"), PEOPLE[first], PEOPLE[second + (second >= first)])
    return Problem(kind.__name__, *kind(scene))
