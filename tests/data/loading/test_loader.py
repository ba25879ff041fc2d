import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import Batch, cut_at
from braidlm.data.loading.chunking import Contiguous, Windows
from braidlm.data.loading.config import CurriculumPoint, MixtureConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from tests.data.packed_sets import numbered, pack, packed_data, stream

MATHS, STORIES = stream(90, "maths", base=1), stream(240, "stories", base=1001)
CURRICULUM = MixtureConfig(
    curriculum=[CurriculumPoint(0, {"stories": 1}), CurriculumPoint(1, {"stories": 1, "maths": 3})]
)
chunking_choices = st.sampled_from(
    [
        Contiguous(),
        Contiguous(Contiguous.Config(40)),
        Windows(Windows.Config(stride=5)),
        Windows(Windows.Config(40, stride=3)),
    ]
)


def loader(**changes: Any) -> Loader:
    settings = {"streams": [STORIES, MATHS], "chunking": Contiguous(), "length": 8, "rows": 3, "mix": CURRICULUM}
    return Loader(**{**settings, **changes})


def same(a: Batch, b: Batch) -> bool:
    arrays = ((a.inputs, b.inputs), (a.labels, b.labels), (a.whole.words, b.whole.words))
    arrays += ((a.whole.sources, b.whole.sources),)
    return all(np.array_equal(*pair) for pair in arrays) and (a.start, a.stop) == (b.start, b.stop)


def test_shapes_and_types() -> None:
    batch = loader(rows=3, accumulation=2, world=2, rank=1).next_batch(0.5)
    assert batch.inputs.shape == batch.labels.shape == (6, 8)
    assert batch.inputs.dtype == batch.labels.dtype == np.int64
    assert batch.whole.words.shape == (12, 8)
    assert batch.whole.words.dtype == np.uint8
    assert batch.whole.sources.shape == (12,)
    assert batch.token_count == 96
    assert batch.inputs.flags.c_contiguous
    assert batch.labels.flags.c_contiguous


@given(chunking_choices, st.integers(0, 3))
@settings(max_examples=20)
def test_labels_are_inputs_shifted_also_where_the_stream_wraps(chunking: Any, seed: int) -> None:
    loading = loader(chunking=chunking, seed=seed)
    for step in range(30):
        batch = loading.next_batch(step / 30)
        for row, (source, length) in enumerate(zip(batch.whole.sources, batch.whole.trained_lengths, strict=True)):
            first, size = (1, 90) if loading.names[source] == "maths" else (1001, 240)
            follows = (batch.inputs[row] - first + 1) % size + first
            assert np.array_equal(batch.labels[row, :length], follows[:length])
            assert (batch.labels[row, length:] == -100).all()
            assert np.array_equal(batch.inputs[row, 1:], follows[:-1])
            assert np.array_equal(batch.whole.words[row], batch.inputs[row] % 3 == 1)


def test_the_wrap_is_really_met() -> None:
    loading = Loader([MATHS], Contiguous(), 8, 11)
    batches = [loading.next_batch() for _ in range(5)]
    assert any((b.labels < b.inputs).any() for b in batches)


def test_each_epoch_of_each_set_shows_its_tokens_once_and_offsets_move() -> None:
    loading = Loader([MATHS], Contiguous(), 8, 11)  # 11 chunks are an epoch
    epochs = [loading.next_batch().inputs for _ in range(3)]
    assert all(set(Counter(e.ravel().tolist()).values()) == {1} for e in epochs)
    assert len({frozenset(e[:, 0].tolist()) for e in epochs}) == 3
    assert loading.epochs == {"maths": 3.0}


def test_rows_follow_the_mix_and_each_set_keeps_its_own_position() -> None:
    loading = loader(mix=MixtureConfig(weights={"stories": 2, "maths": 1}))
    sources = np.concatenate([loading.next_batch().whole.sources for _ in range(20)])
    assert loading.names == ["maths", "stories"]
    assert Counter(sources.tolist()) == {0: 20, 1: 40}
    assert loading.epochs == {"maths": pytest.approx(20 / 11), "stories": pytest.approx(40 / 30)}


def test_a_curriculum_follows_progress() -> None:
    loading = loader(rows=40)
    assert [int((loading.next_batch(p).whole.sources == 0).sum()) for p in (0.0, 0.5, 1.0)] == [0, 15, 30]


def test_the_order_in_which_sets_are_listed_has_no_effect() -> None:
    one, other = loader(), loader(streams=[MATHS, STORIES])
    assert all(same(one.next_batch(i / 9), other.next_batch(i / 9)) for i in range(9))


def test_two_models_with_one_seed_see_the_same_and_another_seed_other_data() -> None:
    one, two, other = loader(seed=1), loader(seed=1), loader(seed=2)
    assert same(one.next_batch(), two.next_batch())
    assert not np.array_equal(two.next_batch().inputs, other.next_batch().inputs)


@given(st.sampled_from([(1, 4), (2, 2), (4, 1)]), st.integers(1, 2), chunking_choices, st.integers(0, 99))
@settings(max_examples=25)
def test_ranks_together_see_what_one_process_sees(shape: tuple[int, int], accum: int, chunking: Any, left: int) -> None:
    world, rows = shape
    alone = loader(rows=4, accumulation=accum, chunking=chunking)
    ranks = [loader(rows=rows, accumulation=accum, chunking=chunking, rank=r, world=world) for r in range(world)]
    for step in range(6):
        marks = {"tokens_left": left} if step == 2 and left else {}
        whole = alone.next_batch(step / 6, **marks)
        parts = [rank.next_batch(step / 6, **marks) for rank in ranks]
        assert np.array_equal(whole.inputs, np.concatenate([p.inputs for p in parts]))
        assert np.array_equal(whole.labels, np.concatenate([p.labels for p in parts]))
        for part in parts:
            assert np.array_equal(part.whole.words, whole.whole.words)
            assert np.array_equal(part.whole.sources, whole.whole.sources)
            assert (part.word_count, part.token_count) == (whole.word_count, whole.token_count)
        assert all(rank.state() == alone.state() for rank in ranks)


@given(st.integers(0, 12), chunking_choices, st.integers(1, 60), st.booleans())
@settings(max_examples=40)
def test_resuming_anywhere_is_as_never_stopping(stop: int, chunking: Any, mark: int, by_words: bool) -> None:
    """Every third batch is cut, so that some stops fall between two pieces."""

    def step(loading: Loader, number: int) -> Batch:
        name = "words_left" if by_words else "tokens_left"
        return loading.next_batch(number / 16, **({name: mark} if number % 3 == 0 else {}))

    through = loader(chunking=chunking)
    expected = [step(through, n) for n in range(16)]
    before = loader(chunking=chunking)
    for number in range(stop):
        step(before, number)
    state = json.loads(json.dumps(before.state()))
    resumed = loader(chunking=chunking)
    resumed.next_batch(0.9, tokens_left=5)  # what came before loading must not matter
    resumed.load_state(state)
    assert resumed.state() == state
    assert all(same(step(resumed, n), expected[n]) for n in range(stop, 16))
    assert resumed.state() == through.state()


def test_taking_the_state_changes_nothing_and_is_small() -> None:
    one, two = loader(), loader()
    for step in range(8):
        assert len(json.dumps(one.state())) < 2000
        assert same(one.next_batch(step / 8), two.next_batch(step / 8))


def test_a_run_may_go_on_with_other_processes_also_inside_a_batch() -> None:
    alone = loader(rows=4)
    alone.next_batch()
    alone.next_batch(0.4, tokens_left=13)
    ranks = [loader(rows=2, rank=r, world=2) for r in range(2)]
    for rank in ranks:
        rank.load_state(alone.state())
    rest, parts = alone.next_batch(0.5), [rank.next_batch(0.5) for rank in ranks]
    assert np.array_equal(rest.labels, np.concatenate([p.labels for p in parts]))
    assert (rest.labels.ravel()[:13] == -100).all()


@given(packed_data(min_documents=6), st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=12))
def test_cuts_meet_every_mark_and_lose_or_repeat_no_label(data: PackedData, marks: list[tuple[bool, int]]) -> None:
    if data.manifest.tokens < 5:
        return
    words_single = pack([np.asarray(data.tokens).tolist()], [np.minimum(data.word_starts, 1).tolist()])
    whole, cut = (Loader([TokenStream(words_single)], Contiguous(), 4, 3) for _ in range(2))
    for by_words, mark in marks:
        uncut = whole.next_batch()
        trained = np.full(uncut.labels.shape, -100)
        words = tokens = 0
        while True:  # the same kind of mark again and again, until the batch is used up
            piece = cut.next_batch(**{"words_left" if by_words else "tokens_left": mark})
            here = piece.labels != -100
            assert np.array_equal(piece.inputs, uncut.inputs)
            assert here.sum() == piece.token_count > 0
            assert (trained[here] == -100).all()
            trained[here] = piece.labels[here]
            assert piece.word_count == piece.whole.words[here].sum()
            words, tokens = words + piece.word_count, tokens + piece.token_count
            if piece.is_last_piece:
                assert (piece.word_count if by_words else piece.token_count) <= mark
                break
            assert (piece.word_count if by_words else piece.token_count) == mark
            assert not by_words or piece.whole.words.ravel()[piece.stop] == 1  # the last word is whole
        assert np.array_equal(trained, uncut.labels)
        assert (words, tokens) == (uncut.word_count, uncut.token_count)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 12), st.none() | st.integers(1, 20))
def test_a_token_with_several_words_is_never_cut_and_never_stops_the_run(
    words: list[int], words_left: int, tokens_left: int | None
) -> None:
    flat, start = np.array([words], np.uint8), 0
    while start < len(words):
        stop = cut_at(flat, start, words_left, tokens_left)
        assert stop > start
        piece = words[start:stop]
        assert tokens_left is None or len(piece) <= tokens_left
        assert sum(piece) - words_left < max(piece, default=1) or sum(piece) <= words_left
        assert sum(piece) >= words_left or stop == len(words) or len(piece) == tokens_left
        start = stop


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 40))
def test_an_epoch_in_words_is_met_exactly(words: int, stride: int, mark: int) -> None:
    """Every third token begins a word; whatever the cuts, epoch e ends at e x words, to the word."""
    loading, total, ends = Loader([STORIES], Windows(Windows.Config(words, stride=stride)), 8, rows=1), 0, []
    for _ in range(60):
        batch = loading.next_batch(words_left=mark)
        total += batch.word_count
        assert batch.token_count == (batch.labels != -100).sum() > 0
        if batch.is_last_piece and loading.epochs["stories"].is_integer():
            ends.append((round(loading.epochs["stories"]), total))
    assert ends == [(epoch, epoch * words) for epoch in range(1, len(ends) + 1)]
    assert ends or total <= words


def test_processes_agree_where_an_epoch_ends_within_a_chunk() -> None:
    chunking = Windows(Windows.Config(10, stride=3))
    alone = loader(chunking=chunking, rows=4)
    ranks = [loader(chunking=chunking, rows=2, rank=r, world=2) for r in range(2)]
    for _ in range(30):
        whole, parts = alone.next_batch(0.5, words_left=7), [rank.next_batch(0.5, words_left=7) for rank in ranks]
        assert np.array_equal(whole.labels, np.concatenate([p.labels for p in parts]))
        assert [p.word_count for p in parts] == [whole.word_count] * 2


def test_a_mark_on_the_edge_of_a_batch_cuts_nothing() -> None:
    loading = Loader([MATHS], Contiguous(), 8, 2)
    assert loading.next_batch(tokens_left=16).is_last_piece
    probe = Loader([MATHS], Contiguous(), 8, 2)
    words = probe.next_batch().word_count
    assert Loader([MATHS], Contiguous(), 8, 2).next_batch(words_left=words).is_last_piece
    assert not Loader([MATHS], Contiguous(), 8, 2).next_batch(words_left=words - 1).is_last_piece
    with pytest.raises(ValueError, match="already met"):
        loading.next_batch(words_left=0)


def test_a_budget_of_words_is_met_exactly_over_many_batches() -> None:
    loading, total, marks = loader(), 0, [37, 100, 101, 250]
    for mark in marks:
        while total < mark:
            total += loading.next_batch(total / 250, words_left=mark - total).word_count
        assert total == mark


def test_shorter_rows_are_of_different_chunks_and_show_every_token_of_an_epoch_once() -> None:
    whole, short = (Loader([MATHS], Contiguous(), 8, rows=1) for _ in range(2))  # 11 chunks are an epoch
    chunks = np.concatenate([whole.next_batch().inputs for _ in range(11)])
    read = []
    for begin in (0, 4, 8):
        batches = [short.next_batch(row_length=2) for _ in range(4)]
        assert [batch.inputs.shape for batch in batches] == [(4, 2)] * 4
        read.append(np.concatenate([batch.inputs for batch in batches], axis=1))
        expected = chunks[begin : begin + 4]
        assert np.array_equal(read[-1][: len(expected)], expected)
        labels = np.concatenate([batch.labels for batch in batches], axis=1)
        assert np.array_equal(labels[:, :-1], read[-1][:, 1:])
    assert Counter(np.concatenate(read)[:11].ravel().tolist()) == Counter(chunks.ravel().tolist())
    assert short.epochs == {"maths": pytest.approx(12 / 11)}


def test_epochs_count_on_while_chunks_are_read_in_shorter_rows() -> None:
    loading = Loader([MATHS], Contiguous(), 8, rows=1)
    found = []
    for _ in range(4):
        loading.next_batch(row_length=2)
        resumed = Loader([MATHS], Contiguous(), 8, rows=1)
        resumed.load_state(json.loads(json.dumps(loading.state())))
        assert resumed.epochs == loading.epochs
        found.append(loading.epochs["maths"])
    assert found == pytest.approx([1 / 11, 2 / 11, 3 / 11, 4 / 11])


def test_chunks_that_were_begun_are_read_to_their_ends() -> None:
    loading = loader(rows=2)
    asked = [4, None, 2, None, None, None, None, 4]  # mixture and length are those of the first row of a chunk
    shapes = [loading.next_batch(number / 8, row_length=length).inputs.shape for number, length in enumerate(asked)]
    assert shapes == [(4, 4), (4, 4), (8, 2), (8, 2), (8, 2), (8, 2), (2, 8), (4, 4)]


def test_columns_beyond_what_is_trained_are_left_out() -> None:
    """An epoch of one word ends within its only chunk, and each of the four chunks of a draw is an epoch."""
    loading, batches = Loader([MATHS], Windows(Windows.Config(1, stride=4)), 8, rows=1), []
    while not batches or loading.state()["column"]:
        batches.append(loading.next_batch(row_length=2))
        assert (batches[-1].labels != -100).sum() == batches[-1].token_count > 0
    assert len(batches) == 3  # words begin at every third token, so none is awaited in the fourth column
    assert sum(batch.word_count for batch in batches) == 4
    assert loading.epochs == {"maths": 4.0}


@given(st.integers(0, 20), chunking_choices, st.integers(1, 20), st.sampled_from([1, 2, 4]))
@settings(max_examples=40)
def test_shorter_rows_resume_and_are_the_same_on_any_number_of_processes(
    stop: int, chunking: Any, mark: int, world: int
) -> None:
    def step(loading: Loader, number: int) -> Batch:
        marks = {"tokens_left": mark} if number % 5 == 3 else {}
        return loading.next_batch(number / 24, **marks, row_length=[2, 4, None][number // 8])

    through = loader(rows=4, chunking=chunking)
    expected = [step(through, number) for number in range(24)]
    before = loader(rows=4, chunking=chunking)
    for number in range(stop):
        step(before, number)
    ranks = [loader(rows=4 // world, chunking=chunking, rank=rank, world=world) for rank in range(world)]
    for rank in ranks:
        rank.load_state(json.loads(json.dumps(before.state())))
    for number in range(stop, 24):
        parts = [step(rank, number) for rank in ranks]
        assert np.array_equal(np.concatenate([part.inputs for part in parts]), expected[number].inputs)
        assert np.array_equal(np.concatenate([part.labels for part in parts]), expected[number].labels)
        assert {part.token_count for part in parts} == {expected[number].token_count}
    assert all(rank.state() == through.state() for rank in ranks)


def test_positions_of_runs_that_cut_rows_out_of_each_batch_still_load() -> None:
    loading = loader()
    loading.next_batch(0.1, tokens_left=5)
    state = loading.state()
    del state["column"], state["row_length"]
    resumed = loader()
    resumed.load_state(state)
    assert same(resumed.next_batch(0.2), loading.next_batch(0.2))


def test_a_saved_position_is_refused_for_other_data_and_says_what_differs() -> None:
    saved = loader(seed=1).state()
    for changes, problem in [
        ({"seed": 2}, "seed: 1 -> 2"),
        ({"length": 16}, "length: 8 -> 16"),
        ({"chunking": Windows(Windows.Config(stride=4))}, "chunking.kind: contiguous -> windows"),
        (
            {"mix": MixtureConfig(weights={"stories": 1, "maths": 1})},
            "mix.weights: null -> {stories: 1, maths: 1}",
        ),
        ({"streams": [STORIES], "mix": None}, "mix.curriculum[0]: {at: 0, weights: {stories: 1}} -> null"),
        ({"streams": [stream(97, "maths"), STORIES]}, "data.maths.tokens: 90 -> 97"),
        ({"streams": [TokenStream(MATHS.data, Subset(0, 0.6)), STORIES]}, "data.maths.subset.stop: 1.0 -> 0.6"),
    ]:
        with pytest.raises(BraidError) as caught:
            loader(**{"seed": 1, **changes}).load_state(saved)
        assert "the saved position belongs to other data" in str(caught.value)
        assert problem in str(caught.value)
        assert "Resume with the data and the settings of the run that was saved" in str(caught.value)


def test_a_position_inside_a_batch_needs_a_batch_of_that_size() -> None:
    one = loader()
    one.next_batch(tokens_left=5)
    with pytest.raises(BraidError, match="inside a batch of 3 rows, and a batch has 4 now"):
        loader(rows=4).load_state(one.state())
    one.next_batch()
    one.next_batch(row_length=4)
    with pytest.raises(BraidError, match="inside a batch of 3 rows, and a batch has 4 now"):
        loader(rows=4).load_state(one.state())
    one.next_batch(row_length=4)
    loader(rows=4).load_state(one.state())  # between batches another size is fine


def test_what_cannot_be_loaded_is_refused_before_any_work() -> None:
    with pytest.raises(BraidError, match="there is no data set to load"):
        loader(streams=[])
    with pytest.raises(BraidError, match="two data sets are called 'maths'"):
        loader(streams=[MATHS, MATHS])
    with pytest.raises(BraidError, match=r"data set 'maths'.*has 90 tokens, but a chunk of length 90 needs 91"):
        loader(length=90)
    other = TokenStream(numbered(90, "other", tokenizer="another"))
    with pytest.raises(BraidError, match="'maths' and 'other' were prepared with different tokenizers"):
        loader(streams=[MATHS, other], mix=None)
