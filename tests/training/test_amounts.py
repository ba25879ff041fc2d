"""Amounts and paces: what is written is what is meant, and reads back the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import Contiguous, Single
from braidlm.data.loading.loader import Loader
from braidlm.model.config.strict import decode, encode
from braidlm.training.amounts import UNITS, Amount, Pace, parse_amount, repetition, short
from tests.data.packed_sets import stream

amounts = st.builds(Amount, st.integers(0, 10**13), st.sampled_from(UNITS))


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    every = draw(st.lists(st.integers(1, 10**7), min_size=1, max_size=4))
    ends = sorted(draw(st.sets(st.integers(1, 10**8), min_size=len(every) - 1, max_size=len(every) - 1)))
    last = draw(st.none() | st.integers(10**8 + 1, 10**9))
    return Pace(tuple(zip(every, [*ends, last], strict=True)), draw(st.sampled_from(UNITS)))


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        (500, 500, "steps"),
        ("500", 500, "steps"),
        (1000.0, 1000, "steps"),
        ("1 step", 1, "steps"),
        ("2.5M tokens", 2_500_000, "tokens"),
        ("2.3M words", 2_300_000, "words"),
        ("4.35k words", 4350, "words"),
        ("10m Words", 10_000_000, "words"),
        ("1_000 tokens", 1000, "tokens"),
        ("1e6 words", 1_000_000, "words"),
        ("1.5e3", 1500, "steps"),
        ("3B tokens", 3 * 10**9, "tokens"),
        ("9007199254740993 tokens", 2**53 + 1, "tokens"),
        ("  7k  ", 7000, "steps"),
    ],
)
def test_an_amount_is_read(text: object, count: int, unit: str) -> None:
    assert decode(Amount, text) == Amount(count, unit)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("many words", "'many words' is not an amount. Write for example `500 steps`"),
        ("10 miles", "'10 miles' is not an amount"),
        ("-5 steps", "'-5 steps' is not an amount"),
        ("", "'' is not an amount"),
        (True, "'True' is not an amount"),
        ("2.5 words", "'2.5 words' is not a whole number of words"),
        (0.5, "'0.5' is not a whole number of steps"),
        ({"count": -1}, "count: expected a whole number from 0 to"),
        ({"count": 1, "unit": "miles"}, "unit: 'miles' is not one of steps, tokens, words"),
    ],
)
def test_what_is_no_amount_is_refused(text: object, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(Amount, text)
    assert problem in str(caught.value)


@given(amounts)
def test_an_amount_reads_back(amount: Amount) -> None:
    assert decode(Amount, encode(amount)) == amount
    assert str(amount) == amount.to_shorthand()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (1500, "1500"), (10**7, "10M"), (2 * 10**9, "2B")]
)
def test_short_loses_nothing(count: int, text: str) -> None:
    assert short(count) == text
    assert parse_amount(text)["count"] == count


def marks(pace: Pace, up_to: int) -> list[int]:
    found, done = [], 0
    while (mark := pace.next_after(done)) is not None and mark <= up_to:
        found.append(mark)
        done = mark
    return found


M = 10**6


@pytest.mark.parametrize(
    ("text", "unit", "up_to", "expected"),
    [
        ("3 steps", "steps", 10, [3, 6, 9]),
        (4, "steps", 10, [4, 8]),
        ("every 3 steps", "steps", 7, [3, 6]),
        ("1M words to 10M, then 10M", "words", 40 * M, [*range(M, 11 * M, M), 20 * M, 30 * M, 40 * M]),
        ("every 1M words to 10M, then every 10M", "words", 20 * M, [*range(M, 11 * M, M), 20 * M]),
        ("10 steps to 30", "steps", 100, [10, 20, 30]),
        ("1 steps to 3, then 10 to 23, 100", "steps", 250, [1, 2, 3, 13, 23, 123, 223]),
        ("4 steps to 10, then 5", "steps", 25, [4, 8, 15, 20, 25]),
    ],
)
def test_a_pace_gives_its_marks(text: object, unit: str, up_to: int, expected: list[int]) -> None:
    pace = decode(Pace, text)
    assert pace.unit == unit
    assert marks(pace, up_to) == expected


@given(paces(), st.integers(0, 10**9))
def test_the_next_mark_does_not_depend_on_where_one_stands_before_it(pace: Pace, done: int) -> None:
    mark = pace.next_after(done)
    if mark is not None:
        assert mark > done
        assert pace.next_after((done + mark) // 2) == mark
        assert pace.next_after(mark - 1) == mark


@given(paces())
def test_a_pace_reads_back(pace: Pace) -> None:
    assert decode(Pace, encode(pace)) == pace


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 steps", "'0 steps' is not a pace: amounts above 0 are needed"),
        ("1M words to 10M tokens, then 5M", "its amounts must be in one unit"),
        ("1M words to 10M, then 5 steps", "its amounts must be in one unit"),
        ("1M words, then 10M", "each part but the last needs an end, as in `1M words to 10M`"),
        ("1 steps to 10, then 5 to 10", "each part must end after the one before"),
        ("1 steps to 10, then 5 to 5", "each part must end after the one before"),
        ("sometimes", "'sometimes' is not an amount"),
        ({"parts": [], "unit": "steps"}, "is not a pace: amounts above 0 are needed"),
        ({"parts": [[1, None]], "unit": "miles"}, "unit: 'miles' is not one of steps, tokens, words"),
    ],
)
def test_what_is_no_pace_is_refused(text: object, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(Pace, text)
    assert problem in str(caught.value)


def test_only_a_budget_that_is_more_than_the_data_is_reported() -> None:
    loader = Loader([stream(300)], Contiguous(), 10, 10)  # 100 words, 3 steps
    within = [Amount(100, "words"), Amount(300, "tokens"), Amount(3, "steps")]
    assert [repetition(budget, loader) for budget in within] == [None] * 3
    assert "data is shown 3.0 times" in (repetition(Amount(9), loader) or "")
    two = Loader([stream(300), stream(300, "other", 1000)], Contiguous(), 10, 10)
    text = repetition(Amount(500, "words"), two)
    assert text is not None
    assert "epochs repeat, and the data is shown 2.5 times on average" in text
    assert repetition(Amount(900, "tokens"), two) is not None


def test_an_epoch_of_documents_is_what_is_read_of_them() -> None:
    loader = Loader([stream(70)], Single(), 5, 2)  # 10 documents of 7 tokens
    assert repetition(Amount(5), loader) is None
    assert repetition(Amount(50, "tokens"), loader) is None
    assert "The budget is 10 steps, 100 tokens, and the data has 50 tokens" in (repetition(Amount(10), loader) or "")
