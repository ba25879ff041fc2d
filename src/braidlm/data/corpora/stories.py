"""The `stories` corpus: short stories for children with a cast, a problem and its end, told from plots that are data.

Every pronoun comes from the character it stands for, so a wrong one can be measured: see `pronoun_pairs`.
"""

import re
from dataclasses import dataclass
from typing import Any

from braidlm.data.corpora.names import FORMS, NAMES
from braidlm.data.corpora.rng import Dice, spread
from braidlm.data.corpora.story_plots_friends import FRIENDS_PLOTS
from braidlm.data.corpora.story_plots_hearts import HEARTS_PLOTS
from braidlm.data.corpora.story_plots_things import THINGS_PLOTS
from braidlm.data.corpora.story_world import (
    ANIMALS,
    CREATURES,
    GLAD,
    GROWN_UPS,
    HOBBIES,
    HOMES,
    NEAR,
    PLACES,
    SAD,
    SCENERY,
    SLOTS,
    TRAITS,
    WHEN,
    Character,
    Phrase,
    Plot,
    Thing,
    opening,
)

PLOTS: tuple[Plot, ...] = THINGS_PLOTS + HEARTS_PLOTS + FRIENDS_PLOTS
MARK = re.compile(r"<([hfgc])\.(\w+)>")
"""What follows a pronoun in a marked story: whose it is, and which form."""

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


def story(seed: int, index: int) -> str:
    """Story `index` of the endless corpus with this seed."""
    return tell(seed, index).text


def tell(seed: int, index: int, stream: str = "stories", marked: bool = False) -> Story:
    """A story with its record; `marked` writes after each pronoun whose it is."""
    dice = Dice(f"{stream}:{seed}:{index}")
    # Plot, hero and friend show in every story, so neighbours differ for certain; all else is chance.
    which, first, second = spread(seed, index, _SIZES)
    plot = PLOTS[which]
    words = _words(dice, plot, first, second + (second >= first), marked)
    parts, ending = _templates(dice, plot)
    template = "".join(parts)
    cast = {key: words[key] for key in "hfgc" if f"{{{key}}}" in template or f"{{{key}." in template}
    return Story(template.format_map(words), plot.name, cast, ending.format_map(words))


def _words(dice: Dice, plot: Plot, first: int, second: int, marked: bool) -> dict[str, Any]:
    """Everything the templates may name, chosen once and so the same through the whole story."""
    pick = dice.pick
    animals = dice.split(2, ANIMALS) if dice.chance() < 0.25 else None
    traits = dice.split(2, TRAITS)
    cast = []
    for number, (key, who) in enumerate((("h", first), ("f", second))):
        name, pronoun = NAMES[who]
        kind = animals[number] if animals else {"she": "girl", "he": "boy"}[pronoun]
        cast.append(Character(key, name, pronoun, kind, traits[number], marked))
    hero, friend = cast
    grown_up, pronoun = pick(GROWN_UPS)
    hobby, hobby2 = dice.split(2, HOBBIES)
    words = {
        "h": hero,
        "f": friend,
        "g": Character("g", grown_up, pronoun, grown_up, "good", marked),
        "c": Character("c", "", "it", pick(CREATURES), pick(("small", "little", "young")), marked),
        "t": Thing(pick(plot.looks), pick(plot.things)),
        "p": pick(PLACES),
        "both": f"{hero} and {friend}",
        "When": pick(WHEN),
        "home": pick(HOMES),
        "near": pick(NEAR),
        "hobby": hobby,
        "hobby2": hobby2,
        "sad": pick(SAD),
        "glad": pick(GLAD),
    }
    for key, values in plot.choices.items():
        words[key] = Phrase(pick(values))
    return words


def _templates(dice: Dice, plot: Plot) -> tuple[list[str], str]:
    """The chosen templates with what stands between them, in one to three paragraphs, and the last template."""
    pick = dice.pick
    skipped = {number for number in plot.spare if dice.chance() < 0.5}
    problem = [pick(beat) for number, beat in enumerate(plot.problem) if number not in skipped]
    if plot.scenery and dice.chance() < 0.3:
        problem.insert(1, pick(SCENERY))
    ending = pick(plot.ends)
    solution = [pick(beat) for number, beat in enumerate(plot.solution, len(plot.problem)) if number not in skipped]
    breaks = pick(("  ", " \n", "\n ", "\n\n"))  # between opening and problem, and between problem and solution
    paragraphs = [" ".join(opening(dice)), " ".join(problem), " ".join([*solution, ending])]
    return [paragraphs[0], breaks[0], paragraphs[1], breaks[1], paragraphs[2]], ending


def pronoun_pairs(seed: int, count: int) -> list[PronounPair]:
    """Beginnings of stories that no corpus holds, whose next word stands for someone already named.

    Nobody of the other gender has been named by then, so the wrong pronoun has no antecedent. He and she alternate.
    """
    pairs: list[PronounPair] = []
    index = 0
    while len(pairs) < count:
        dice = Dice(f"pairs:{seed}:{index}")
        pair = _pair(dice, tell(seed, index, stream="pairs", marked=True), "she" if len(pairs) % 2 else "he")
        if pair:
            pairs.append(pair)
        index += 1
    return pairs


_OTHER = {"he": "she", "she": "he"}


def _pair(dice: Dice, marked: Story, pronoun: str) -> PronounPair | None:
    """A pair from one story, or nothing if it holds no clear place for this pronoun."""
    if marked.cast["h"].pronoun != pronoun:
        return None
    others = [who.name for who in marked.cast.values() if who.pronoun == _OTHER[pronoun]]
    end = min([at for name in others if (at := marked.text.find(name)) >= 0], default=len(marked.text))
    places = [place for place in MARK.finditer(marked.text, 0, end) if marked.cast[place[1]].pronoun == pronoun]
    # The pronoun's own word lies between the last space and the mark; a word after a line break or a quote is left out.
    starts = [(marked.text.rfind(" ", 0, place.start()), place) for place in places]
    clear = [(at, place) for at, place in starts if marked.text[at + 1 : place.start()].isalpha()]
    if not clear:
        return None
    at, place = dice.pick(clear)
    right = marked.text[at + 1 : place.start()]
    wrong = FORMS[_OTHER[pronoun]][SLOTS.index(place[2].lower())]
    wrong = wrong.capitalize() if right[0].isupper() else wrong
    return PronounPair(MARK.sub("", marked.text[:at]), f" {right}", f" {wrong}")
