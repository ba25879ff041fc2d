"""The `stories` corpus: short stories for children with a cast, a problem and its solution, from plots that are data.

Every pronoun comes from the character it stands for, so a wrong one can be measured: see `pronoun_pairs`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.data.corpora.material import FORMS, NAMES, Rng, cast, words

SLOTS = ("he", "him", "his", "hers", "himself")
"""How a template asks for a form of a pronoun, whoever the character is: {h.his} may become 'her'."""
MARK = re.compile(r"<([hfgc])\.(\w+)>")
"""The mark after a pronoun in a marked story: which character it means, and which form it is."""
OPTIONAL, SCENIC = "(optional)\n", "\n(scenery)"
Beat = tuple[str, ...]
"""Variants of one moment of a story, of which one is used."""


def a(phrase: str) -> str:
    """The phrase with its article; no word of the stories has a silent h or a vowel that sounds like 'you'."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


class Character:
    """Someone in a story; templates read its attributes, such as {h.his}, and {h} alone is the name."""

    def __init__(self, key: str, name: str, pronoun: str, kind: str, trait: str, marked: bool):
        self.name, self.pronoun, self.kind = name, pronoun, kind
        self.a = a(f"{trait} {kind}")
        self.hand = "hand" if kind in ("girl", "boy") else "paw"
        for slot, form in zip(SLOTS, FORMS[pronoun], strict=True):
            # Tests and pronoun pairs need to know whom each pronoun means; a mark after it says so.
            mark = f"<{key}.{slot}>" if marked else ""
            setattr(self, slot, form + mark)
            setattr(self, slot.capitalize(), form.capitalize() + mark)

    def __str__(self) -> str:
        return self.name


class Phrase(str):
    """A choice of a plot; {food.a} is the phrase with its article."""

    @property
    def a(self) -> str:
        return a(self)


class Thing(Phrase):
    """An object with a property that stays with it: {t} is 'red ball', {t.a} 'a red ball', {t.noun} 'ball'."""

    look: str
    noun: str

    def __new__(cls, look: str, noun: str) -> "Thing":
        thing = super().__new__(cls, f"{look} {noun}")
        thing.look, thing.noun = look, noun
        return thing


@dataclass(frozen=True)
class Place:
    """Somewhere outside: {p} is 'park', {p.at} 'in the park', {p.to} 'to the park'."""

    name: str
    preposition: str

    @property
    def at(self) -> str:
        return f"{self.preposition} the {self.name}"

    @property
    def to(self) -> str:
        return f"to the {self.name}"

    def __str__(self) -> str:
        return self.name


ANIMALS = words("rabbit bear fox mouse squirrel kitten puppy hedgehog badger otter raccoon beaver")
CREATURES = words("bird duckling owl lamb goose deer swan foal turtle calf")
TRAITS = words("kind happy curious friendly gentle cheerful quiet lively clever polite young sweet funny busy little")
GROWN_UPS = (("mom", "she"), ("dad", "he"), ("grandma", "she"), ("grandpa", "he"))
LOOKS = words("red blue green yellow pink purple orange white brown golden shiny striped")
CARRIED = (*words("ball hat scarf bell book whistle ribbon marble button ring cup basket drum kite doll"), "toy boat")
PLACES = tuple(
    Place(name, preposition)
    for preposition, names in (
        ("in", "park garden field forest meadow yard"), ("by", "pond river lake"), ("on", "hill farm"),
    )
    for name in words(names)
)  # fmt: skip
SAD = ("sad", "upset", "unhappy")
GLAD = ("happy", "glad", "cheerful", "joyful")


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
    scenery = problem[0].endswith(SCENIC)
    before, after = (tuple(map(_variants, act)) for act in (problem, solution))
    return Plot(name, before, after, _variants(ends), choices, looks, things, scenery, optional)


def _variants(beat: str) -> Beat:
    return tuple(beat.removeprefix(OPTIONAL).removesuffix(SCENIC).split("\n"))


def _sections(file: str) -> list[str]:
    return [part.strip() for part in Path(__file__).with_name(file).read_text("utf-8").split("\n== ")[1:]]


PLOTS = tuple(map(read_plot, _sections("plots.txt")))
TEXTS = {name: tuple(lines) for name, *lines in (section.split("\n") for section in _sections("world.txt"))}
"""The variants of texts that all plots share."""


@dataclass(frozen=True)
class Story:
    """A story with the generator's own record of it."""

    text: str
    plot: str
    cast: dict[str, Character]
    """By key: h the hero, f the friend, and where they appear g a grown-up and c an animal in need."""
    ending: str
    """The last sentences, which close the story."""


@dataclass(frozen=True)
class PronounPair:
    """A story's beginning, and what may follow: a pronoun that agrees with its antecedent, or one that cannot."""

    prefix: str
    right: str
    wrong: str


def story_text(seed: int, index: int) -> str:
    """The `stories` corpus: short stories for children with a cast, a problem and its solution."""
    return generate_story(seed, index).text


def generate_story(seed: int, index: int, stream: str = "stories", marked: bool = False) -> Story:
    """Story `index` of the endless corpus with this seed; `marked` adds a mark after each pronoun."""
    rng = Rng(f"{stream}:{seed}:{index}")
    number, hero, friend = cast(seed, index, len(PLOTS))
    plot = PLOTS[number]
    fields = _fields(rng, plot, hero, friend, marked)
    parts, ending = _templates(rng, plot)
    template = "".join(parts)
    named = {key: fields[key] for key in "hfgc" if f"{{{key}}}" in template or f"{{{key}." in template}
    return Story(template.format_map(fields), plot.name, named, ending.format_map(fields))


def _fields(rng: Rng, plot: Plot, first: int, second: int, marked: bool) -> dict[str, Any]:
    """The values of all template fields, chosen once for the whole story."""
    choice = rng.choice
    animals = rng.sample(ANIMALS, 2) if rng.random() < 0.25 else None
    traits = rng.sample(TRAITS, 2)
    fields: dict[str, Any] = {}
    for number, (key, who) in enumerate((("h", first), ("f", second))):
        name, pronoun = NAMES[who]
        kind = animals[number] if animals else {"she": "girl", "he": "boy"}[pronoun]
        fields[key] = Character(key, name, pronoun, kind, traits[number], marked)
    grown_up, pronoun = choice(GROWN_UPS)
    fields["hobby"], fields["hobby2"] = rng.sample(TEXTS["hobbies"], 2)
    fields["g"] = Character("g", grown_up, pronoun, grown_up, "good", marked)
    fields["c"] = Character("c", "", "it", choice(CREATURES), choice(("small", "little", "young")), marked)
    fields["t"] = Thing(choice(plot.looks), choice(plot.things))
    fields["p"] = choice(PLACES)
    fields["both"] = f"{fields['h']} and {fields['f']}"
    fields |= {key: choice(TEXTS[texts]) for key, texts in (("When", "when"), ("home", "homes"), ("near", "near"))}
    fields |= {key: choice(texts) for key, texts in (("sad", SAD), ("glad", GLAD))}
    return fields | {key: Phrase(choice(values)) for key, values in plot.choices.items()}


def _templates(rng: Rng, plot: Plot) -> tuple[list[str], str]:
    """The chosen templates with the breaks between them, in one to three paragraphs, and the last template."""
    choice = rng.choice
    skipped = {number for number in plot.optional if rng.random() < 0.5}
    problem = [choice(beat) for number, beat in enumerate(plot.problem) if number not in skipped]
    if plot.scenery and rng.random() < 0.3:
        problem.insert(1, choice(TEXTS["scenery"]))
    ending = choice(plot.ends)
    solution = [choice(beat) for number, beat in enumerate(plot.solution, len(plot.problem)) if number not in skipped]
    breaks = choice(("  ", " \n", "\n ", "\n\n"))  # between opening and problem, and between problem and solution
    # The friend always comes after the hero.
    opening, friend = [choice(TEXTS["openings"])], choice(TEXTS["friends"])
    opening += [friend] if rng.random() < 0.4 else [choice(TEXTS["likings"]), friend]
    return [" ".join(opening), breaks[0], " ".join(problem), breaks[1], " ".join([*solution, ending])], ending


def pronoun_pairs(seed: int, count: int) -> list[PronounPair]:
    """Beginnings of stories that are in no corpus, whose next word is a pronoun for someone already named.

    Nobody of the other gender has been named by then, so the wrong pronoun has no antecedent. He and she alternate.
    """
    pairs: list[PronounPair] = []
    index = 0
    while len(pairs) < count:
        rng = Rng(f"pairs:{seed}:{index}")
        pair = _pair(rng, generate_story(seed, index, stream="pairs", marked=True), "she" if len(pairs) % 2 else "he")
        pairs += [pair] if pair else []
        index += 1
    return pairs


def _pair(rng: Rng, marked: Story, pronoun: str) -> PronounPair | None:
    """A pair from one story, or None if this pronoun has no clear occurrence in it."""
    if marked.cast["h"].pronoun != pronoun:
        return None
    other = {"he": "she", "she": "he"}[pronoun]
    others = [who.name for who in marked.cast.values() if who.pronoun == other]
    end = min([at for name in others if (at := marked.text.find(name)) >= 0], default=len(marked.text))
    marks = [mark for mark in MARK.finditer(marked.text, 0, end) if marked.cast[mark[1]].pronoun == pronoun]
    # The pronoun is the word between the last space and the mark; one after a line break or a quote is left out.
    starts = [(marked.text.rfind(" ", 0, mark.start()), mark) for mark in marks]
    clear = [(at, mark) for at, mark in starts if marked.text[at + 1 : mark.start()].isalpha()]
    if not clear:
        return None
    at, mark = rng.choice(clear)
    right = marked.text[at + 1 : mark.start()]
    wrong = FORMS[other][SLOTS.index(mark[2].lower())]
    wrong = wrong.capitalize() if right[0].isupper() else wrong
    return PronounPair(MARK.sub("", marked.text[:at]), f" {right}", f" {wrong}")
