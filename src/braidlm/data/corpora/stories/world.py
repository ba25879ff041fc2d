"""The material of the stories: characters, things, places, and the texts of `world.txt` and `plots.txt`."""

from dataclasses import dataclass
from pathlib import Path

from braidlm.data.corpora.names import FORMS, words
from braidlm.data.corpora.rng import Rng

SLOTS = ("he", "him", "his", "hers", "himself")
"""How a template asks for a form of a pronoun, whoever the character is: {h.his} may become 'her'."""


def a(phrase: str) -> str:
    """The phrase with its article; no word of the stories has a silent h or a vowel that sounds like 'you'."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


class Character:
    """Someone in a story; templates read its attributes, and {h} alone is the name."""

    # Filled from SLOTS; declared for the reader and the type checker.
    he: str
    him: str
    his: str
    hers: str
    himself: str
    He: str
    His: str

    def __init__(self, key: str, name: str, pronoun: str, kind: str, trait: str, marked: bool):
        self.name, self.pronoun, self.kind = name, pronoun, kind
        self.a = a(f"{trait} {kind}")
        self.hand = "hand" if kind in ("girl", "boy") else "paw"
        # Tests and pronoun pairs need to know whom each pronoun means; a mark after it says so.
        self.__dict__.update(_MARKED[pronoun, key] if marked else _PLAIN[pronoun])

    def __str__(self) -> str:
        return self.name


def _forms(pronoun: str, key: str | None) -> dict[str, str]:
    forms = {}
    for slot, form in zip(SLOTS, FORMS[pronoun], strict=True):
        mark = f"<{key}.{slot}>" if key else ""
        forms[slot] = form + mark
        forms[slot.capitalize()] = form.capitalize() + mark
    return forms


_PLAIN = {pronoun: _forms(pronoun, None) for pronoun in FORMS}
_MARKED = {(pronoun, key): _forms(pronoun, key) for pronoun in FORMS for key in "hfgc"}


class Phrase(str):
    """A choice of a plot; {food.a} is the phrase with its article."""

    @property
    def a(self) -> str:
        return a(self)


class Thing:
    """An object with a property that stays with it: {t} is 'red ball', {t.a} 'a red ball', {t.noun} 'ball'."""

    def __init__(self, look: str, noun: str):
        self.look, self.noun = look, noun
        self.full = f"{look} {noun}"
        self.a = a(self.full)

    def __str__(self) -> str:
        return self.full


class Place:
    """Somewhere outside: {p} is 'park', {p.at} 'in the park', {p.to} 'to the park'."""

    def __init__(self, name: str, preposition: str):
        self.name = name
        self.at, self.to = f"{preposition} the {name}", f"to the {name}"

    def __str__(self) -> str:
        return self.name


Beat = tuple[str, ...]
"""Variants of one moment of a story, of which one is used."""

ANIMALS = words("rabbit bear fox mouse squirrel kitten puppy hedgehog badger otter raccoon beaver")
CREATURES = words("bird duckling owl lamb goose deer swan foal turtle calf")
TRAITS = words("kind happy curious friendly gentle cheerful quiet lively clever polite young sweet funny busy little")
GROWN_UPS = (("mom", "she"), ("dad", "he"), ("grandma", "she"), ("grandpa", "he"))
LOOKS = words("red blue green yellow pink purple orange white brown golden shiny striped")
CARRIED = (*words("ball hat scarf bell book whistle ribbon marble button ring cup basket drum kite doll"), "toy boat")
PLACES = (
    *(Place(name, "in") for name in words("park garden field forest meadow yard")),
    *(Place(name, "by") for name in words("pond river lake")),
    *(Place(name, "on") for name in words("hill farm")),
)
SAD = ("sad", "upset", "unhappy")
GLAD = ("happy", "glad", "cheerful", "joyful")


def _sections(file: str) -> list[str]:
    return [part.strip() for part in Path(__file__).with_name(file).read_text("utf-8").split("\n== ")[1:]]


@dataclass(frozen=True)
class Plot:
    """A problem and its end, as `plots.txt` tells them."""

    name: str
    problem: tuple[Beat, ...]
    solution: tuple[Beat, ...]
    ends: Beat
    choices: dict[str, Beat]
    """Phrases that are chosen once for the whole story."""
    looks: Beat
    things: Beat
    scenery: bool
    """Whether a line about fine weather fits after the first beat."""
    optional: tuple[int, ...]
    """Indices of beats that may be left out, counted through problem and solution."""


def read_plot(text: str) -> Plot:
    """A plot of `plots.txt`, which says how one is written."""
    (head, *problem), solution, (ends,) = (act.strip().split("\n\n") for act in text.split("\n--\n"))
    name, *lines = head.split("\n")
    choices = {key: tuple(values.split(" | ")) for key, _, values in (line.partition(": ") for line in lines)}
    looks, things = choices.pop("t.look", LOOKS), choices.pop("t.noun", CARRIED)
    optional = tuple(number for number, beat in enumerate(problem + solution) if beat.startswith(OPTIONAL))
    return Plot(
        name,
        tuple(map(_variants, problem)),
        tuple(map(_variants, solution)),
        _variants(ends),
        choices,
        looks,
        things,
        problem[0].endswith(SCENIC),
        optional,
    )


def _variants(beat: str) -> Beat:
    return tuple(beat.removeprefix(OPTIONAL).removesuffix(SCENIC).split("\n"))


OPTIONAL, SCENIC = "(optional)\n", "\n(scenery)"
PLOTS = tuple(map(read_plot, _sections("plots.txt")))
TEXTS = {name: tuple(lines) for name, *lines in (section.split("\n") for section in _sections("world.txt"))}
"""The variants of texts that all plots share."""


def opening(rng: Rng) -> list[str]:
    """The templates that introduce the hero and the friend; the friend always comes after the hero."""
    first, friend = rng.choice(TEXTS["openings"]), rng.choice(TEXTS["friends"])
    return [first, friend] if rng.random() < 0.4 else [first, rng.choice(TEXTS["likings"]), friend]
