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

    @property
    def row(self) -> dict[str, str]:
        """The problem as fields, with the answer as GSM8K states it: after the solution and a mark."""
        return {"question": self.question, "answer": f"{self.solution}\n#### {self.answer}"}


def problem_text(seed: int, index: int) -> str:
    """Problem `index` of the endless corpus with this seed."""
    return generate_problem(seed, index).text


def problem_row(seed: int, index: int) -> dict[str, str]:
    """Problem `index` as the fields question and answer."""
    return generate_problem(seed, index).row


def generate_problem(seed: int, index: int) -> Problem:
    """Problem `index` with its parts."""
    # The kind and both people show in every problem, so neighbours differ for certain; all else is random.
    kind_index, first, second = spread(seed, index, _SIZES)
    kind = KINDS[kind_index]
    scene = Scene(Rng(f"maths:{seed}:{index}"), PEOPLE[first], PEOPLE[second + (second >= first)])
    return Problem(kind.__name__, *kind(scene))
