"""The stories corpus: grammar, consistency, and pronouns that agree with the generator's own record of the cast."""

import re
from collections import Counter

import pytest

from braidlm.data.corpora.material import BOYS, GIRLS, NAMES
from braidlm.data.corpora.stories import LOOKS, MARK, PLOTS, generate_story, pronoun_pairs, story_text

INDICES = range(3_000)
STORIES = [generate_story(5, index) for index in INDICES]
MARKED = [generate_story(5, index, marked=True) for index in INDICES]
FEMALE = {"she", "her", "hers", "herself"}
MALE = {"he", "him", "his", "himself"}
GENDER = {**dict(NAMES), "mom": "she", "grandma": "she", "dad": "he", "grandpa": "he", "": "it"}


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def test_every_plot_is_told():
    counts = Counter(s.plot for s in STORIES)
    assert set(counts) == {plot.name for plot in PLOTS}
    assert len(counts) >= 12


def test_marks_do_not_change_the_story():
    for plain, marked in zip(STORIES, MARKED, strict=True):
        assert MARK.sub("", marked.text) == plain.text
        assert "<" not in plain.text
        assert "{" not in plain.text


def test_every_gendered_pronoun_belongs_to_someone_already_named():
    checked = 0
    for s in MARKED:
        for match in re.finditer(r"\b([A-Za-z]+)\b(<(\w)\.\w+>)?", s.text):
            pronoun, key = match[1].lower(), match[3]
            if pronoun not in FEMALE | MALE:
                continue
            assert key, f"a pronoun that belongs to nobody: {s.text}"
            who = s.cast[key]
            assert pronoun in {"she": FEMALE, "he": MALE}[GENDER[who.name]], s.text
            assert re.search(rf"\b{who.name}\b", s.text[: match.start()]), s.text
            checked += 1
    assert checked > 10_000


def test_a_story_of_one_gender_has_no_pronoun_of_the_other():
    alone = Counter()
    for s in STORIES:
        cast = {GENDER[who.name] for who in s.cast.values()} - {"it"}
        found = {word.lower() for word in words(s.text)}
        if cast == {"she"}:
            assert not found & MALE, s.text
        if cast == {"he"}:
            assert not found & FEMALE, s.text
        alone.update(cast if len(cast) == 1 else ())
    assert min(alone["she"], alone["he"]) > 200


def test_the_record_holds_everyone_who_is_named():
    everyone = set(GIRLS + BOYS)
    for s in STORIES:
        named = {word for word in words(s.text) if word in everyone}
        assert named == {s.cast["h"].name, s.cast["f"].name}, s.text
        hero = next(word for word in words(s.text) if word in everyone)
        assert hero == s.cast["h"].name
        grown_ups = set(words(s.text)) & {"mom", "dad", "grandma", "grandpa"}
        assert grown_ups == ({s.cast["g"].name} if "g" in s.cast else set()), s.text


def test_people_are_girls_and_boys_as_their_names_say():
    for s in STORIES:
        for who in (s.cast["h"], s.cast["f"]):
            assert who.kind not in ("girl", "boy") or (who.kind == "girl") == (who.name in GIRLS)


def test_articles_agree_with_the_next_word():
    for s in STORIES:
        for article, word in re.findall(r"\b([Aa]n?) (\w+)", s.text):
            assert (article.lower() == "an") == (word[0] in "aeiou" or word == "hour"), (article, word)


def test_a_thing_keeps_its_look():
    things = {thing for plot in PLOTS for thing in plot.things}
    pattern = re.compile(rf"\b({'|'.join(LOOKS)}) ({'|'.join(sorted(things, key=len, reverse=True))})\b")
    seen = 0
    for s in STORIES:
        looks = pattern.findall(s.text)
        assert len(set(looks)) <= 1, s.text
        seen += len(looks) > 1
    assert seen > 500


def test_every_story_has_its_end():
    for s, plain in zip(STORIES, INDICES, strict=True):
        assert s.text.endswith(s.ending)
        assert s.text == story_text(5, plain)
        assert len(s.ending.split()) > 4


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_each_plot_ends_well_and_can_be_shortened(plot):
    assert len(plot.ends) >= 3
    assert all(len(beat) >= 2 for beat in plot.problem + plot.solution)
    assert max(plot.optional) < len(plot.problem + plot.solution)


def test_punctuation_and_paragraphs():
    for s in STORIES:
        paragraphs = s.text.split("\n")
        assert 1 <= len(paragraphs) <= 3
        for paragraph in paragraphs:
            assert paragraph == paragraph.strip() != ""
            assert "  " not in paragraph
            assert re.search(r'[.!?]"?$', paragraph), paragraph
            assert re.match(r'"?[A-Z]', paragraph), paragraph
            assert paragraph.count('"') % 2 == 0, paragraph
            assert not re.search(r'[.] [a-z]|[,;] [,.]|\.\.|[.!?][A-Za-z]| [.,!?]|[a-z]"[a-z]', paragraph), paragraph


def test_length_and_vocabulary():
    lengths = [len(s.text.split()) for s in STORIES]
    assert 90 < sum(lengths) / len(lengths) < 140
    assert min(lengths) >= 60
    assert max(lengths) <= 200
    assert 800 <= len({word.lower() for s in STORIES for word in words(s.text)}) <= 1200


def test_pronoun_pairs_agree_with_the_only_gender_named():
    pairs = pronoun_pairs(0, 400)
    assert len(pairs) == 400
    assert pairs == pronoun_pairs(0, 400)
    assert pairs[:50] == pronoun_pairs(0, 50)
    for pair in pairs:
        right, wrong = pair.right.strip().lower(), pair.wrong.strip().lower()
        assert pair.right == f" {pair.right.strip()}"
        assert pair.wrong == f" {pair.wrong.strip()}"
        genders = {GENDER[word] for word in words(pair.prefix) if word in GENDER}
        assert len(genders) == 1
        own, other = (FEMALE, MALE) if genders == {"she"} else (MALE, FEMALE)
        assert right in own
        assert wrong in other
        assert pair.right[1].isupper() == pair.wrong[1].isupper()
        assert pair.right[1].islower() or re.search(r'[.!?]"?$', pair.prefix), pair
        assert "<" not in pair.prefix + pair.right
        assert not pair.prefix.endswith(" ")
    assert Counter(pair.right.strip().lower() in MALE for pair in pairs) == {True: 200, False: 200}
    assert len({pair.right for pair in pairs}) > 6


def test_pronoun_pairs_keep_the_case_of_the_form():
    """Her before a noun stands against his, and her after a verb against him."""
    against = {(pair.right.strip().lower(), pair.wrong.strip().lower()) for pair in pronoun_pairs(3, 600)}
    allowed = {("she", "he"), ("her", "his"), ("her", "him"), ("herself", "himself"), ("hers", "his")}
    assert against <= allowed | {(b, a) for a, b in allowed}
    assert {("her", "his"), ("her", "him"), ("his", "her"), ("him", "her")} <= against


def test_pronoun_pairs_come_from_stories_that_no_corpus_holds():
    corpus = {story_text(0, index)[:300] for index in range(2_000)}
    assert not [pair for pair in pronoun_pairs(0, 300) if len(pair.prefix) > 300 and pair.prefix[:300] in corpus]
