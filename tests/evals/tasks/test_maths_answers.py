"""Answers in solutions: where they stand, and when two are the same."""

import pytest

from braidlm.evals.tasks.maths import (
    EXAMPLES,
    last_boxed,
    last_number,
    normalised,
    plain_number,
    same_expression,
    stated_expression,
    stated_number,
)


@pytest.mark.parametrize(
    ("solution", "said", "last"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18", "18"),
        ("So 70,000 it is.\n#### 70,000", "70000", "70000"),
        ("5 + 4 = 9. The answer is 9.", "9", "9"),
        ("The answer is $1,234.50. Then 3 more", "1234.50", "3"),
        ("The answer is -3", "-3", "-3"),
        ("the answer is: 7.", "7", "7"),
        ("so \\boxed{12} it is", "12", "12"),
        ("The answer is .5", ".5", ".5"),
        ("The answer is 8. The answer is 9.", "8", "9"),
        ("I have 3 apples and 4 pears", None, "4"),
        ("It costs $5.", None, "5"),
        ("None at all... really,", None, None),
        ("The answer is unknown", None, None),
        ("", None, None),
    ],
)
def test_numbers_of_word_problems(solution: str, said: str | None, last: str | None) -> None:
    assert stated_number(solution) == said
    assert last_number(solution) == last


def test_plain_numbers() -> None:
    assert [plain_number(text) for text in (" 1,000 ", "$5.", "-$3", "2.50")] == ["1000", "5", "-3", "2.50"]


def test_the_examples_are_read_as_they_are_meant() -> None:
    assert [stated_number(solution) for _, solution in EXAMPLES["gsm8k"]] == ["6", "5", "39", "8", "9", "29", "33", "8"]
    assert [stated_expression(solution) for _, solution in EXAMPLES["math"]] == ["[2,5)", "24", "16", "-\\frac{2}{3}"]
    assert [last_boxed(solution) for _, solution in EXAMPLES["math"]] == ["[2,5)", "24", "16", "-\\frac{2}{3}"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("$\\boxed{2}$", "2"),
        ("first \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\text{a}_{b_{c}}} and {so} on", "\\text{a}_{b_{c}}"),
        ("so $\\boxed 7$ it is", "7"),
        ("\\fbox{x}", "x"),
        ("\\boxed{never closed", None),
        ("\\boxed", None),
        ("nothing", None),
        ("\\boxed{}", ""),
    ],
)
def test_boxes(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("Final Answer: The final answer is $3$. I hope it is correct.", "3"),
        ("\\boxed{4} Final Answer: The final answer is $0.5$. I hope it is correct.", "0.5"),
        ("Final Answer: The final answer is \\boxed{9}. I hope it is correct.", "9"),
        ("Final Answer: The final answer is 12.", "12"),
        ("Final Answer: The final answer is $x=2$ or so. I hope", "x=2"),
        ("Its final answer is positive because so. $\\boxed{5}$", "5"),
        ("no answer", None),
    ],
)
def test_final_answers(solution: str, answer: str | None) -> None:
    assert stated_expression(solution) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # The cases that the authors of MATH test themselves.
        ("\\tfrac{1}{2} + \\frac1{72}", "\\\\frac{1}{2} + 2/3", False),
        ("10, 4, -2", "4, 10, -2", False),
        ("\\tfrac{1}{2} +\\! \\frac1{72}", "\\\\dfrac{1}{2} +\\frac{1}{72}", True),
        ("10\\text{ units}", "10 ", True),
        ("10\\text{ units}", "100 ", False),
        ("10", "\\$10", True),
        ("\\left(x-2\\right)\\left(x+2\\right)", "(x-2)(x+2)", True),
        ("0.1, 4, 2", "4, .1, 2", False),
        ("0.1", ".1", True),
        ("10\\%", "10", True),
        ("10\\sqrt{3} + \\sqrt4", "10\\sqrt3 + \\sqrt{4}", True),
        ("\\frac34i", "\\frac{3}{4}i", True),
        ("\\tfrac83", "\\frac{8}{3}", True),
        ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", False),
        ("1/2", "\\frac{1}{2}", True),
        # And the quirks of their rules.
        ("0.5", "\\frac12", True),
        ("0.50", "\\frac12", False),
        ("k = 3", "3", True),
        ("abc = 3", "3", False),
        ("x=y=3", "3", False),
        ("90^\\circ", "90", True),
        ("90^{\\circ}", "90", True),
        ("\\frac{72}1", "\\frac{72}{1}", False),
        ("-1/2", "\\frac{-1}{2}", True),
        ("-1/2", "-\\frac{1}{2}", False),
        ("1/02", "\\frac{1}{02}", False),
        ("a/b", "\\frac{a}{b}", False),
        ("2\\text{ and }3\\text{ cm}", "2\\text{ and }3\\text{ cm}", True),
        ("2\\text{ and }3\\text{ cm}", "2", False),
        ("\\sqrt", "\\sqrt", True),
        ("\\frac", "\\frac ", False),
        ("1,000", "1000", False),
        ("", "", True),
        (None, "1", False),
        (None, None, False),
    ],
)
def test_when_answers_are_the_same(one: str | None, other: str | None, same: bool) -> None:
    assert same_expression(one, other) is same
    assert same_expression(other, one) is same


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\\dfrac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac1", "\\frac1"),
        ("{.5}", "{0.5}"),
        ("x .5", "x0.5"),
        ("\\sqrt{2}\n3", "\\sqrt{2}3"),
        ("50\\%", "50"),
        ("%", ""),
        ("p=.5", ".5"),
        ("3/4", "\\frac{3}{4}"),
    ],
)
def test_normal_forms(text: str, plain: str) -> None:
    assert normalised(text) == plain
