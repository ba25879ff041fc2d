"""The arithmetic corpus: true answers, and calculations that it never has."""

import re
from collections import Counter

from braidlm.data.corpora.maths import Problem, arithmetic_text, calculation, is_held_out, one_step_problem
from braidlm.data.corpora.problems import ONE_STEP

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
TRAINED = [one_step_problem(3, index, held_out=False) for index in range(3_000)]
HELD_OUT = [one_step_problem(3, index, held_out=True) for index in range(600)]


def test_every_answer_is_true() -> None:
    for problem in TRAINED + HELD_OUT:
        ((left, sign, right, result),) = EQUATION.findall(problem.solution)
        x, y = int(left), int(right)
        assert {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign] == int(result) == problem.answer
        assert {left, right} <= set(re.findall(r"\d+", problem.question))


def test_every_kind_appears_equally_often() -> None:
    counts = Counter(problem.kind for problem in TRAINED)
    assert len(counts) == len(ONE_STEP)
    assert min(counts.values()) > len(TRAINED) / len(counts) / 2


def test_held_out_calculations_are_in_no_corpus() -> None:
    trained = {calculation(problem) for problem in TRAINED}
    held_out = {calculation(problem) for problem in HELD_OUT}
    assert not trained & held_out
    assert len(held_out) > 300
    assert not any(is_held_out(one_step_problem(seed, 0, held_out=False)) for seed in range(200))


def test_the_order_of_a_sum_does_not_matter() -> None:
    assert calculation(Problem("", "", "12 + 3 = 15", 15)) == calculation(Problem("", "", "3 + 12 = 15", 15))
    assert calculation(Problem("", "", "9 - 3 = 6", 6)) == "9 - 3"


def test_a_document_is_its_fields() -> None:
    row = one_step_problem(3, 7).row
    assert arithmetic_text(3, 7) == f"Question: {row['question']}\nAnswer: {row['answer']}"
    assert row["answer"].endswith(f"\n#### {TRAINED[7].answer}")
