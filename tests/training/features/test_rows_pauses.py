"""Pauses in batches: the text stays what it is, every token of it is predicted once, and no pause ever is."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED, Batch
from braidlm.data.loading.chunking import Contiguous
from braidlm.data.loading.loader import Loader
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import PAUSE, BraidTokenizer, SpecialTokens
from braidlm.training.features.rows import Pauses
from tests.data.packed_sets import stream

STREAMS = [stream(100, "stories"), stream(60, "maths", 1000)]
TOKEN = 30_000
LENGTH, COUNT = 9, 4


class Paused:
    """A loader, and pauses in its batches."""

    def __init__(self, count: int = COUNT, seed: int = 1, rows: int = 4, **options: Any):
        self.loader = loader(seed, rows, **options)
        self.pauses = Pauses(TOKEN, count, seed, self.loader.names)

    def next_batch(self, **options: Any) -> Batch:
        return self.pauses.read_batch(self.loader.next_batch(**options))


def loader(seed: int = 1, rows: int = 4, **options: Any) -> Loader:
    return Loader(STREAMS, Contiguous(), LENGTH, rows=rows, seed=seed, **options)


def text_of(batch: Batch) -> list[list[int]]:
    return [[token for token in row if token != TOKEN] for row in batch.inputs.tolist()]


@given(st.integers(1, 30), st.integers(0, 5))
def test_the_text_is_that_of_a_run_without_pauses(count: int, seed: int) -> None:
    plain, paused = loader(seed), Paused(count, seed)
    for _ in range(3):
        one, other = plain.next_batch(), paused.next_batch()
        assert other.inputs.shape == other.labels.shape == (4, LENGTH + count)
        assert text_of(other) == one.inputs.tolist()
        assert [row[row != IGNORED].tolist() for row in other.labels] == one.labels.tolist()
        assert (one.token_count, one.word_count) == (other.token_count, other.word_count)


def test_a_batch_may_have_no_rows() -> None:
    plain = loader().next_batch()
    whole = replace(plain.whole, tokens=plain.whole.tokens[:0], positions=plain.whole.positions[:0])
    none = Paused().pauses.read_batch(replace(plain, inputs=plain.inputs[:0], labels=plain.labels[:0], whole=whole))
    assert none.inputs.shape == none.labels.shape == (0, LENGTH + COUNT)


def test_a_token_is_predicted_from_the_last_pause_before_it() -> None:
    batch = Paused().next_batch()
    for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        for place, label in enumerate(labels):
            followed_by_pause = place + 1 < len(inputs) and inputs[place + 1] == TOKEN
            assert (label == IGNORED) == followed_by_pause
            if label != IGNORED and place + 1 < len(inputs):
                assert inputs[place + 1] == label


def test_places_depend_on_seed_and_text_alone() -> None:
    one = Paused().next_batch()
    assert np.array_equal(one.inputs, Paused().next_batch().inputs)
    moved = Pauses(TOKEN, COUNT, 2, ["maths", "stories"]).read_batch(loader().next_batch())
    assert text_of(moved) == text_of(one)
    assert not np.array_equal(moved.inputs, one.inputs)
    assert len({tuple(row) for row in (one.inputs == TOKEN).tolist()}) > 1, "rows differ"
    halves = [Paused(rows=2, rank=rank, world=2) for rank in (0, 1)]
    assert np.array_equal(np.concatenate([half.next_batch().inputs for half in halves]), one.inputs)


def test_a_cut_batch_and_a_resumed_one_have_the_same_pauses() -> None:
    whole, cut = Paused(), Paused()
    expected = whole.next_batch()
    first = cut.next_batch(tokens_left=13)
    resumed = Paused()
    resumed.loader.load_state(cut.loader.state())
    rest = resumed.next_batch()
    assert np.array_equal(first.inputs, expected.inputs)
    assert np.array_equal(rest.inputs, expected.inputs)
    assert (first.labels != IGNORED).sum() == 13
    assert np.array_equal(np.where(first.labels == IGNORED, rest.labels, first.labels), expected.labels)


def test_positions_are_those_of_the_tokens() -> None:
    batch = loader().next_batch()
    for row, source, positions in zip(batch.inputs, batch.whole.own_sources, batch.whole.positions, strict=True):
        data = sorted(STREAMS, key=lambda one: one.name)[source]
        assert np.array_equal(data.tokens_at(positions), row)


def made(rate: float, length: int, tokenizer: BraidTokenizer) -> list[Any]:
    data = SimpleNamespace(length=length, pauses=rate)
    setup: Any = SimpleNamespace(data=data, opened=SimpleNamespace(tokenizer=tokenizer, train=STREAMS), seed=1)
    return [(one.token, one.count, one.seed, one.names) for one in Pauses.make(setup)]  # type: ignore[attr-defined]


def test_how_many_there_are() -> None:
    tokenizer = bytes_tokenizer(SpecialTokens(order=("<|endoftext|>", "<|pad|>", PAUSE)))
    assert made(0.0, 128, bytes_tokenizer()) == []
    assert made(0.1, 128, tokenizer) == [(258, 13, 1, ["maths", "stories"])]
    with pytest.raises(BraidError, match="special token <pause>"):
        made(0.1, 128, bytes_tokenizer())
    with pytest.raises(BraidError, match="0 of the 4 tokens"):
        made(0.1, 4, tokenizer)
