"""The material of the word problems: two people, things to count, and random numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from braidlm.data.corpora.names import FORMS, NAMES
from braidlm.data.corpora.rng import Rng

SIBILANTS = ("s", "x", "ch", "sh")
"""Endings of nouns whose plural has -es."""


@dataclass(frozen=True)
class Person:
    """Someone in a problem, with the pronouns that agree."""

    name: str
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:
        return self.he.capitalize()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Noun:
    """A thing to count."""

    one: str
    many: str

    def of(self, count: int) -> str:
        """'1 apple', '2 apples', '0 apples'."""
        return f"{count} {self.one if count == 1 else self.many}"


def nouns(text: str) -> tuple[Noun, ...]:
    """Nouns with a regular plural, or with both forms separated by a slash."""
    return tuple(
        Noun(*one.split("/")) if "/" in one else Noun(one, f"{one}{'es' if one.endswith(SIBILANTS) else 's'}")
        for one in text.split()
    )


PEOPLE = tuple(Person(name, *FORMS[pronoun][:3]) for name, pronoun in NAMES)
ITEMS = nouns(
    "apple pencil marble sticker book card shell button coin stamp orange cookie pear flower stone crayon "
    "bead ribbon balloon cupcake nut peach plum lemon block badge ticket photo star cherry/cherries "
    "postcard candle eraser carrot muffin seed leaf/leaves"
)
HOLDERS = nouns("box bag basket jar packet bowl tray drawer")
GOODS = nouns("notebook pen cup plate toy kite scarf/scarves hat ball puzzle comic brush candle")
DEAR = nouns("bike tent guitar camera chair table desk telescope coat jacket lamp clock sled violin")
DOLLAR, YEAR, HOUR, MINUTE, DAY, WEEK = nouns("dollar year hour minute day week")
METER, PAGE, FRIEND = nouns("meter page friend")


class Scene:
    """The two people of one problem, of whom `a` is named first, and random choices for everything else."""

    __slots__ = ("a", "b", "choice", "randint")

    def __init__(self, rng: Rng, a: Person, b: Person):
        self.a, self.b = a, b
        self.choice, self.randint = rng.choice, rng.randint

    def either(self, *texts: str) -> str:
        """One of several ways to say it."""
        return self.choice(texts)

    def size(self) -> int:
        """A count: often small, sometimes in the hundreds."""
        return self.randint(2, self.choice((20, 50, 100, 400)))


Parts = tuple[str, str, int]
"""Question, solution, answer."""
ProblemKind = Callable[[Scene], Parts]


def are(count: int) -> str:
    """The verb for a count."""
    return "is" if count == 1 else "are"
