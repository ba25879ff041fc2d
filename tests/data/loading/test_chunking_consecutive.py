"""Consecutive chunks: a row of the batch reads on where it stopped, and an epoch still shows everything once."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.chunking import Consecutive, Contiguous
from braidlm.data.loading.config import CurriculumPoint, MixtureConfig
from braidlm.data.loading.loader import Loader
from tests.data.packed_sets import stream

MATHS, STORIES = stream(90, "maths", base=1), stream(240, "stories", base=1001)
FIRST = {"maths": (1, 90), "stories": (1001, 240)}
sizes = st.tuples(st.integers(2, 150), st.integers(1, 20)).filter(lambda pair: pair[0] > pair[1])


def loader(**changes: Any) -> Loader:
    settings = {"streams": [STORIES, MATHS], "chunking": Consecutive(), "length": 8, "rows": 4}
    return Loader(**{**settings, **changes})


def follows(loading: Loader, before: Batch, after: Batch) -> list[bool]:
    """Whether each row's text goes on where it ended, by the numbers that the tokens are."""
    found = []
    for row, source in enumerate(before.whole.sources):
        first, size = FIRST[loading.names[source]]
        found.append((before.inputs[row, -1] - first + 1) % size + first == after.inputs[row, 0])
    return found


@given(sizes, st.integers(1, 30), st.integers(0, 3), st.integers(0, 9))
def test_an_epoch_has_the_chunks_of_contiguous(size: tuple[int, int], rows: int, epoch: int, seed: int) -> None:
    tokens, length = size
    own = Consecutive().starts(stream(tokens), length, epoch, seed, rows)
    assert sorted(own) == sorted(Contiguous().starts(stream(tokens), length, epoch, seed))
    assert ((own[rows:] - own[:-rows]) % tokens == length % tokens).all() or len(own) <= rows


@given(st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=30)
def test_rows_that_are_said_to_go_on_do(rows: int, seed: int) -> None:
    loading = loader(streams=[STORIES], rows=rows, seed=seed)
    before = loading.next_batch()
    assert not before.whole.continues.any(), "no row has a text before the first batch"
    for _ in range(40):
        after = loading.next_batch()
        goes_on = np.array(follows(loading, before, after))
        assert goes_on[after.whole.continues].all()
        before = after


def test_rows_go_on_to_the_end_of_the_epoch() -> None:
    loading = Loader([STORIES], Consecutive(), 8, rows=4)  # 30 chunks: two rows have eight of them, two have seven
    goes_on = [loading.next_batch().whole.continues.tolist() for _ in range(9)]
    assert goes_on[0] == [False] * 4
    assert goes_on[1:7] == [[True] * 4] * 6
    assert goes_on[7] == [True, True, False, False], "the next epoch begins in the rows that are done"
    assert goes_on[8] == [False, False, True, True]


def test_every_epoch_shows_each_token_once() -> None:
    loading = Loader([MATHS], Consecutive(), 8, rows=11)  # 11 chunks are an epoch
    epochs = [loading.next_batch().inputs for _ in range(3)]
    assert all(set(Counter(e.ravel().tolist()).values()) == {1} for e in epochs)
    assert len({frozenset(e[:, 0].tolist()) for e in epochs}) == 3
    assert loading.epochs == {"maths": 3.0}


def test_each_data_set_keeps_its_rows() -> None:
    loading = loader(mix=MixtureConfig(weights={"stories": 3, "maths": 1}))
    batches = [loading.next_batch(step / 12) for step in range(12)]
    assert {tuple(batch.whole.sources) for batch in batches} == {tuple(batches[0].whole.sources)}
    assert Counter(batches[0].whole.sources.tolist()) == {0: 1, 1: 3}
    for before, after in pairwise(batches):
        assert np.array(follows(loading, before, after))[after.whole.continues].all()


def test_other_chunkings_never_go_on() -> None:
    loading = loader(chunking=Contiguous())
    assert not any(loading.next_batch().whole.continues.any() for _ in range(9))


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        (MixtureConfig(curriculum=[CurriculumPoint(0, {"stories": 1, "maths": 1})]), "share cannot change"),
        (MixtureConfig(weights={"stories": 99, "maths": 1}), "4 rows leave none for 'maths', whose share is 1.00%"),
    ],
)
def test_a_mix_that_rows_cannot_keep_is_refused(mix: MixtureConfig, problem: str) -> None:
    with pytest.raises(BraidError, match=problem):
        loader(mix=mix)


@given(st.sampled_from([(2, 2), (4, 1)]), st.integers(1, 2))
@settings(max_examples=10)
def test_ranks_together_see_what_one_process_sees(shape: tuple[int, int], accumulation: int) -> None:
    world, rows = shape
    alone = loader(rows=4, accumulation=accumulation)
    ranks = [loader(rows=rows, accumulation=accumulation, rank=r, world=world) for r in range(world)]
    for _ in range(12):
        whole, parts = alone.next_batch(), [rank.next_batch() for rank in ranks]
        assert np.array_equal(whole.inputs, np.concatenate([p.inputs for p in parts]))
        assert np.array_equal(whole.whole.continues, np.concatenate([p.whole.continues for p in parts]))


@given(st.integers(0, 12), st.integers(1, 60), st.booleans())
@settings(max_examples=30)
def test_resuming_anywhere_is_as_never_stopping(stop: int, mark: int, by_words: bool) -> None:
    """Every third batch is cut, so that some stops fall between two pieces."""

    def step(loading: Loader, number: int) -> tuple[Any, ...]:
        name = "words_left" if by_words else "tokens_left"
        batch = loading.next_batch(number / 16, **({name: mark} if number % 3 == 0 else {}))
        return batch.inputs.tolist(), batch.labels.tolist(), batch.whole.continues.tolist(), batch.is_last_piece

    through, before, resumed = loader(), loader(), loader()
    expected = [step(through, number) for number in range(16)]
    for number in range(stop):
        step(before, number)
    resumed.load_state(json.loads(json.dumps(before.state())))
    assert [step(resumed, number) for number in range(stop, 16)] == expected[stop:]
    assert resumed.state() == through.state()


def test_budgets_are_met_exactly() -> None:
    loading, total = loader(), 0
    for mark in (37, 100, 101, 250):
        while total < mark:
            total += loading.next_batch(words_left=mark - total).word_count
        assert total == mark


def test_a_position_belongs_to_a_number_of_rows() -> None:
    saved = loader(rows=4)
    saved.next_batch()
    with pytest.raises(BraidError, match="each of 4 rows read a text of its own, and there are 5 now"):
        loader(rows=5).load_state(saved.state())


def test_the_order_is_the_same_on_every_machine() -> None:
    """These numbers must never change: a resumed run would read other data."""
    assert Consecutive().starts(stream(60), 10, 2, 7, rows=4).tolist() == [48, 8, 28, 38, 58, 18]
