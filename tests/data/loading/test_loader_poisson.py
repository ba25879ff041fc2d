"""Poisson sampling: every row is in every batch by itself, with one probability, and counts do not tell which were."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch
from braidlm.data.loading.chunking import Single, Windows
from braidlm.data.loading.config import MixtureConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.streams import TokenStream
from tests.data.packed_sets import pack, stream

FEW, MANY = stream(50, "few"), stream(270, "many")  # 5 and 30 rows; the same tokens at the same places
WEIGHTS = MixtureConfig(weights={"few": 1, "many": 3})
STEPS = 4000


def sampled(key: int = 1, **changes: Any) -> Loader:
    chunking = Windows(Windows.Config(stride=9))
    loader = Loader(**{"streams": [FEW, MANY], "chunking": chunking, "length": 8, "rows": 4, "mix": WEIGHTS} | changes)
    loader.use_poisson_sampling(key)
    return loader


def rows_of(batch: Batch) -> list[tuple[int, int]]:
    """The data set of each row, and the row's number in it."""
    assert len(batch.inputs) == len(batch.whole.sources) == len(batch.whole.words)
    return [(int(s), int(p) // 9) for s, p in zip(batch.whole.sources, batch.whole.positions[:, 0], strict=True)]


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    """[steps, rows] bool: which of the 35 rows is in which batch."""
    loader, drawn = sampled(), np.zeros((STEPS, 35), bool)
    for step in drawn:
        rows = [row + 5 * source for source, row in rows_of(loader.next_batch())]
        assert len(set(rows)) == len(rows)
        step[rows] = True
    return drawn


def test_every_row_has_the_probability_of_its_data_set(draws: np.ndarray) -> None:
    wanted = np.repeat([1 / 5, 3 / 30], [5, 30])
    assert np.abs(draws.mean(0) - wanted).max() < 4.5 * (0.16 / STEPS) ** 0.5


def test_rows_and_steps_are_independent(draws: np.ndarray) -> None:
    centred = (draws - draws.mean(0)) / draws.std(0)
    beside = centred.T @ centred / STEPS - np.eye(35)
    after = centred[1:].T @ centred[:-1] / STEPS
    assert max(np.abs(beside).max(), np.abs(after).max()) < 5 / STEPS**0.5
    sizes = draws.sum(1)
    assert (sizes.mean(), sizes.var()) == pytest.approx((4, 5 * 0.16 + 30 * 0.09), rel=0.08)
    assert 0 in sizes, "a batch may have no rows"


def test_another_key_draws_other_rows() -> None:
    one, same, other = sampled(1), sampled(1), sampled(2)
    batches = [[rows_of(loader.next_batch()) for _ in range(20)] for loader in (one, same, other)]
    assert batches[0] == batches[1] != batches[2]


@pytest.mark.parametrize("rows", [1, 30])
def test_a_row_has_its_text_and_all_its_labels(rows: int) -> None:
    loader = sampled(streams=[MANY], mix=None, rows=rows)
    for _ in range(20):
        batch = loader.next_batch(words_left=1, tokens_left=1)
        begins = [1 + 9 * row for _, row in rows_of(batch)]
        assert batch.inputs.tolist() == [list(range(begin, begin + 8)) for begin in begins]
        assert np.array_equal(batch.labels, batch.inputs + 1), "no mark cuts a batch"
        assert batch.is_last_piece
        assert batch.target_count == max(8 * len(begins), 1)
        assert len(begins) == 30 or rows == 1


def test_counts_are_those_of_the_mean_batch_whatever_is_drawn() -> None:
    loader, one_in_three = sampled(), 4 * 8 / 3
    for step in range(1, 30):
        batch = loader.next_batch()
        assert (batch.token_count, batch.word_count) == (4 * 8, round(one_in_three))
        assert loader.epochs == pytest.approx({"few": step / 5, "many": step / 10})


def test_documents_count_what_is_trained_of_them() -> None:
    short, long = [[1, 2, 0]] * 30, [[*range(1, 20), 0]] * 10
    loader = Loader([*map(_documents, ("short", "long"), (short, long))], Single(), 8, 4)
    assert loader.use_poisson_sampling(3) == (round(4 / 40 * (30 * 3 + 10 * 8)), round(4 / 40 * (30 + 10 * 7 * 8 / 20)))
    assert loader.rates == pytest.approx({"short": 0.1, "long": 0.1})
    for batch in (loader.next_batch() for _ in range(20)):
        assert (batch.labels != -100).sum(1).tolist() == [[8, 3][source] for source in batch.whole.sources]


def _documents(name: str, documents: list[list[int]]) -> Any:
    return TokenStream(pack(documents, name=name))


@given(st.integers(0, 12), st.integers(0, 9), st.sampled_from([1, 4]))
def test_resuming_anywhere_draws_what_would_have_been_drawn(stop: int, key: int, rows: int) -> None:
    through, before, resumed = (sampled(k, rows=rows) for k in (key, key, key + 1))
    wanted = [rows_of(through.next_batch()) for _ in range(stop + 4)]
    for _ in range(stop):
        before.next_batch()
    resumed.load_state(before.state())
    assert [rows_of(resumed.next_batch()) for _ in range(4)] == wanted[stop:]
    assert resumed.epochs == through.epochs
    assert resumed.state() == through.state()


def test_a_run_with_shuffled_rows_does_not_go_on_with_drawn_ones() -> None:
    shuffled = Loader([FEW, MANY], Windows(Windows.Config(stride=9)), 8, 4, mix=WEIGHTS)
    with pytest.raises(BraidError, match="sampling: null -> poisson"):
        sampled().load_state(shuffled.state())
    with pytest.raises(BraidError, match="sampling: poisson -> null"):
        shuffled.load_state(sampled().state())
