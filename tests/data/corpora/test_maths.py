"""The maths corpus: each solution is checked by arithmetic of its own, and each question is solved again."""

import re
from collections import Counter
from math import ceil, prod

import pytest

from braidlm.data.corpora.material import BOYS, GIRLS
from braidlm.data.corpora.maths import generate_problem, problem_text
from braidlm.data.corpora.problems import DOLLAR, GOODS, HOLDERS, HOUR, ITEMS, KINDS, MINUTE, PAGE, WEEK, YEAR

PROBLEMS = [generate_problem(11, index) for index in range(6_000)]
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
# How each kind is solved from the numbers of its question, written without looking at the generator.
SOLVE = {
    "together": lambda x, y: x + y,
    "more": lambda x, y: x - y,
    "give": lambda x, y: x - y,
    "at_first": lambda x, y: x + y,
    "groups": lambda x, y: x * y,
    "share": lambda x, y: x / y,
    "left_over": lambda x, y: x % y,
    "boxes_needed": lambda x, y: ceil(x / y),
    "boxes_given": lambda x, y, z: x * y - z,
    "three_steps": lambda x, y, z, w: x + y * z - w,
    "times_as_many": lambda x, y: x * (y + 1),
    "rows": lambda x, y, z: x * y + z,
    "change": lambda x, price, paid: paid - x * price,
    "saving": lambda price, x, weeks: price - x * weeks,
    "same_price": lambda total, x, y: total / x * y,
    "distance": lambda *values: prod(values),
    "travel_time": lambda distance, speed: distance / speed,
    "part": lambda whole, above, below: whole * above / below,
    "percent": lambda price, rate: price * (100 - rate) / 100,
    "average": lambda count, *values: sum(values) / count,
    "perimeter": lambda x, y: 2 * x + 2 * y,
    "area": lambda x, y: x * y,
    "ages": lambda x, y, z: x + y + z,
    "calendar": lambda weeks, days: 7 * weeks + days,
    "clock": lambda h, m, h2, m2: (60 * h2 + m2) - (60 * h + m),
    "sequence": lambda *values: 2 * values[-1] - values[-2],
    "doubling": lambda x: x * 2**3,
    "teamwork": lambda x, y, hours: (x + y) * hours,
}


def value(left: int, sign: str, right: int) -> float:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left / right if right else -1}[sign]


def test_every_kind_appears_equally_often():
    counts = Counter(p.kind for p in PROBLEMS)
    assert set(counts) == set(SOLVE) == {kind.__name__ for kind in KINDS}
    assert len(counts) >= 14
    assert min(counts.values()) > len(PROBLEMS) / len(counts) / 2


def test_every_equation_is_true_and_the_answer_is_the_last_result():
    for p in PROBLEMS:
        equations = EQUATION.findall(p.solution)
        assert len(equations) == p.solution.count("="), p.text
        for left, sign, right, result in equations:
            assert value(int(left), sign, int(right)) == int(result), p.text
        assert int(equations[-1][3]) == p.answer, p.text


@pytest.mark.parametrize("kind", sorted(SOLVE))
def test_the_answer_follows_from_the_question(kind):
    for p in PROBLEMS:
        if p.kind == kind:
            assert SOLVE[kind](*map(int, re.findall(r"\d+", p.question))) == p.answer, p.text


def test_the_document_has_three_ascii_lines():
    for index in range(2_000):
        lines = problem_text(4, index).split("\n")
        assert re.fullmatch(r"Question: [A-Z].*\?", lines[0]), lines
        assert re.fullmatch(r"Solution: [A-Z0-9].*\.", lines[1]), lines
        assert re.fullmatch(r"Answer: \d+", lines[2]), lines
        assert len(lines) == 3
        assert all(line.isascii() and "  " not in line for line in lines)


def test_no_number_is_negative():
    assert not any(re.search(r"(?<![\d ] )-\s?\d|= -", p.text) for p in PROBLEMS)


def test_singular_and_plural_agree_with_the_number():
    nouns = [*ITEMS, *HOLDERS, *GOODS, DOLLAR, HOUR, MINUTE, PAGE, WEEK, YEAR]
    plurals, singulars = {n.many for n in nouns}, {n.one for n in nouns}
    ones = 0
    for p in PROBLEMS:
        for number, word in re.findall(r"(?<![\d/])(\d+) (\w+)", p.text):
            assert word not in (plurals if number == "1" else singulars), p.text
            ones += number == "1" and word in singulars
        assert not re.search(r"\b1 are\b|(?<!\d)([2-9]|\d\d+) is left", p.text), p.text
    assert ones > 20


def test_plurals_are_spelled_well():
    forms = {n.one: n.many for n in (*ITEMS, *HOLDERS, *GOODS)}
    assert forms["box"] == "boxes"
    assert forms["brush"] == "brushes"
    assert forms["leaf"] == "leaves"
    assert forms["cherry"] == "cherries"
    assert not [many for many in forms.values() if re.search(r"([^aeiou]ys|xs|chs|shs|fs)$", many)]


def test_articles_agree_with_the_next_word():
    for p in PROBLEMS:
        for article, letter in re.findall(r"\b([Aa]n?) (\w)", p.text):
            assert (article.lower() == "an") == (letter in "aeiou"), p.text


def test_pronouns_agree_with_the_first_person():
    found = Counter()
    for p in PROBLEMS:
        first = re.search(r"\b(" + "|".join(GIRLS + BOYS) + r")\b", p.question)[1]
        pronouns = {word.lower() for word in re.findall(r"\b(?:he|him|his|she|her)\b", p.text, re.IGNORECASE)}
        assert pronouns <= ({"she", "her"} if first in GIRLS else {"he", "him", "his"}), p.text
        found.update(pronouns)
    assert found["he"] > 100
    assert found["she"] > 100
