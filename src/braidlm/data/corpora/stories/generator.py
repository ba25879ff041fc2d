"""The `stories` corpus: short stories for children with a cast, a problem and its solution, from plots that are data.

Every pronoun comes from the character it stands for, so a wrong one can be measured: see `pronoun_pairs`.
"""

import re
from dataclasses import dataclass
from typing import Any

from braidlm.data.corpora.names import FORMS, NAMES
from braidlm.data.corpora.rng import Rng, spread
from braidlm.data.corpora.stories import world
from braidlm.data.corpora.stories.world import PLOTS, SLOTS, TEXTS, Character, Phrase, Plot, Thing, opening

MARK = re.compile(r"<([hfgc])\.(\w+)>")
"""The mark after a pronoun in a marked story: which character it means, and which form it is."""

_SIZES = (len(PLOTS), len(NAMES), len(NAMES) - 1)


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
    """Story `index` of the endless corpus with this seed."""
    return generate_story(seed, index).text


def generate_story(seed: int, index: int, stream: str = "stories", marked: bool = False) -> Story:
    """Story `index` with its record; `marked` adds a mark after each pronoun."""
    rng = Rng(f"{stream}:{seed}:{index}")
    # Plot, hero and friend show in every story, so neighbours differ for certain; all else is random.
    plot_index, first, second = spread(seed, index, _SIZES)
    plot = PLOTS[plot_index]
    words = _words(rng, plot, first, second + (second >= first), marked)
    parts, ending = _templates(rng, plot)
    template = "".join(parts)
    cast = {key: words[key] for key in "hfgc" if f"{{{key}}}" in template or f"{{{key}." in template}
    return Story(template.format_map(words), plot.name, cast, ending.format_map(words))


def _words(rng: Rng, plot: Plot, first: int, second: int, marked: bool) -> dict[str, Any]:
    """The values of all template fields, chosen once for the whole story."""
    choice = rng.choice
    animals = rng.sample(world.ANIMALS, 2) if rng.random() < 0.25 else None
    traits = rng.sample(world.TRAITS, 2)
    cast = []
    for number, (key, who) in enumerate((("h", first), ("f", second))):
        name, pronoun = NAMES[who]
        kind = animals[number] if animals else {"she": "girl", "he": "boy"}[pronoun]
        cast.append(Character(key, name, pronoun, kind, traits[number], marked))
    hero, friend = cast
    grown_up, pronoun = choice(world.GROWN_UPS)
    hobby, hobby2 = rng.sample(TEXTS["hobbies"], 2)
    words = {
        "h": hero,
        "f": friend,
        "g": Character("g", grown_up, pronoun, grown_up, "good", marked),
        "c": Character("c", "", "it", choice(world.CREATURES), choice(("small", "little", "young")), marked),
        "t": Thing(choice(plot.looks), choice(plot.things)),
        "p": choice(world.PLACES),
        "both": f"{hero} and {friend}",
        "When": choice(TEXTS["when"]),
        "home": choice(TEXTS["homes"]),
        "near": choice(TEXTS["near"]),
        "hobby": hobby,
        "hobby2": hobby2,
        "sad": choice(world.SAD),
        "glad": choice(world.GLAD),
    }
    for key, values in plot.choices.items():
        words[key] = Phrase(choice(values))
    return words


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
    paragraphs = [" ".join(opening(rng)), " ".join(problem), " ".join([*solution, ending])]
    return [paragraphs[0], breaks[0], paragraphs[1], breaks[1], paragraphs[2]], ending


def pronoun_pairs(seed: int, count: int) -> list[PronounPair]:
    """Beginnings of stories that are in no corpus, whose next word is a pronoun for someone already named.

    Nobody of the other gender has been named by then, so the wrong pronoun has no antecedent. He and she alternate.
    """
    pairs: list[PronounPair] = []
    index = 0
    while len(pairs) < count:
        rng = Rng(f"pairs:{seed}:{index}")
        pair = _pair(rng, generate_story(seed, index, stream="pairs", marked=True), "she" if len(pairs) % 2 else "he")
        if pair:
            pairs.append(pair)
        index += 1
    return pairs


_OTHER = {"he": "she", "she": "he"}


def _pair(rng: Rng, marked: Story, pronoun: str) -> PronounPair | None:
    """A pair from one story, or None if this pronoun has no clear occurrence in it."""
    if marked.cast["h"].pronoun != pronoun:
        return None
    others = [who.name for who in marked.cast.values() if who.pronoun == _OTHER[pronoun]]
    end = min([at for name in others if (at := marked.text.find(name)) >= 0], default=len(marked.text))
    marks = [mark for mark in MARK.finditer(marked.text, 0, end) if marked.cast[mark[1]].pronoun == pronoun]
    # The pronoun is the word between the last space and the mark; one after a line break or a quote is left out.
    starts = [(marked.text.rfind(" ", 0, mark.start()), mark) for mark in marks]
    clear = [(at, mark) for at, mark in starts if marked.text[at + 1 : mark.start()].isalpha()]
    if not clear:
        return None
    at, mark = rng.choice(clear)
    right = marked.text[at + 1 : mark.start()]
    wrong = FORMS[_OTHER[pronoun]][SLOTS.index(mark[2].lower())]
    wrong = wrong.capitalize() if right[0].isupper() else wrong
    return PronounPair(MARK.sub("", marked.text[:at]), f" {right}", f" {wrong}")
