"""Answers in batches: whole documents in rows, each answer's tokens labels exactly once, in training and validation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.data.loading.batches import IGNORED
from braidlm.data.loading.chunking import Contiguous, Documents, document_rows
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.packed_data import PackedData
from tests.data.packed_sets import EOS, answered_data, numbered, pack, packed_data

QUESTIONS = pack([[11, 12, 13, EOS], [21, 22, EOS], [31, 32, 33, 34, EOS]], prompts=[1, 0, 3])


def answers(data: PackedData) -> list[int]:
    """The tokens that are to be predicted."""
    assert data.targets is not None
    return sorted(data.tokens[data.targets == 1].tolist())


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 9))
def test_rows_have_whole_documents_and_as_many_as_fit(sizes: list[int], length: int) -> None:
    bounds = np.cumsum([0, *sizes])
    if not bounds[-1]:
        return
    starts = document_rows(bounds, length).tolist()
    ends = [*starts[1:], int(bounds[-1])]
    assert starts[0] == 0
    for start, end in zip(starts, ends, strict=True):
        assert 0 < end - start <= length
        within = [int(size) for at, size in zip(bounds, sizes, strict=False) if at < end < at + size]
        assert all(size > length for size in within), "only a document that fits nowhere is cut"
        following = [bound for bound in bounds.tolist() if bound > end]
        if following and end in bounds:
            assert following[0] - start > length, "the next document does not fit"


@given(packed_data(min_documents=2), st.integers(1, 12), st.integers(0, 3))
def test_an_epoch_of_documents_has_every_token_once(data: PackedData, length: int, epoch: int) -> None:
    toy = TokenStream(data)
    if len(toy) <= length:
        return
    chunking = Documents()
    starts = chunking.starts(toy, length, epoch, 5)
    lengths = chunking.trained_lengths(toy, starts, length)
    labels = [toy.read(start + 1, count)[0].tolist() for start, count in zip(starts, lengths, strict=True)]
    assert sorted(token for row in labels for token in row) == sorted(data.tokens.tolist())
    assert lengths.max() <= length


def test_documents_begin_elsewhere_in_another_epoch() -> None:
    toy = TokenStream(numbered(210))
    epochs = [Documents().starts(toy, 16, epoch, 0).tolist() for epoch in range(6)]
    assert len({tuple(sorted(starts)) for starts in epochs}) == 2, "pairs of documents begin at an odd or an even one"
    assert len({tuple(starts) for starts in epochs}) == 6
    assert Documents().starts(toy, 16, 0, 0).tolist() == epochs[0]


def test_documents_that_are_cut_are_said() -> None:
    assert Documents().warning(TokenStream(QUESTIONS), 5) is None
    text = Documents().warning(TokenStream(QUESTIONS), 4)
    assert text is not None
    assert "1 of 3 documents" in text
    assert Documents().warning(TokenStream(numbered(30)), 4) is None, "plain text is cut by every method"


@given(answered_data(), st.integers(1, 7), st.integers(1, 9))
def test_an_epochs_labels_are_the_answers(data: PackedData, length: int, mark: int) -> None:
    """Also where batches are cut at a number of tokens; the counts of the pieces are those of their labels."""
    toy = TokenStream(data)
    if len(toy) <= length:
        return
    loader, seen, read = Loader([toy], Documents(), length, rows=1), [], 0
    while loader.epochs["toy"] < 1:
        piece = loader.next_batch(tokens_left=mark)
        real = piece.labels != IGNORED
        assert piece.target_count == max(real.sum(), 1)
        seen += piece.labels[real].tolist()
        read += piece.token_count
    assert sorted(seen) == answers(data)
    assert read == len(toy), "budgets count questions too"


def test_counts_are_of_all_ranks() -> None:
    parts = [
        Loader([TokenStream(QUESTIONS)], Documents(), 5, rows=1, seed=1, rank=rank, world=2).next_batch()
        for rank in (0, 1)
    ]
    real = sum(int((part.labels != IGNORED).sum()) for part in parts)
    assert [part.target_count for part in parts] == [real, real]


def test_a_set_without_prompts_is_all_labels_beside_one_with() -> None:
    plain = TokenStream(numbered(40, "plain", 100))
    loader = Loader([TokenStream(QUESTIONS), plain], Contiguous(), 5, rows=8, seed=0)
    batch = loader.next_batch()
    of_plain = batch.whole.sources == loader.names.index("plain")
    assert (batch.labels[of_plain] != IGNORED).all()
    assert (batch.labels[~of_plain] == IGNORED).any()


@given(answered_data(), st.integers(1, 12), st.integers(1, 4), st.none() | st.integers(1, 40))
def test_validation_predicts_every_answer_once_after_its_question(
    data: PackedData, length: int, rows: int, max_tokens: int | None
) -> None:
    toy = TokenStream(data)
    text = validation_windows(toy, length, max_tokens, rows=rows)
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*text, strict=True))
    assert len(list(text)) == len(text)
    bounds, documents = toy.document_bounds, int(np.searchsorted(toy.document_bounds, text.end))
    assert max_tokens is None or documents == 1 or bounds[documents] <= max_tokens
    flat, mask = data.tokens[: text.end], data.targets
    assert mask is not None
    assert labels[labels != IGNORED].tolist() == flat[mask[: text.end] == 1].tolist()
    assert text.tokens == (labels != IGNORED).sum()
    assert text.bytes == data.document_target_bytes[:documents].sum()
    previous = dict(zip(flat[1:].tolist(), flat[:-1].tolist(), strict=True))
    for row, targets in zip(inputs, labels, strict=True):
        for token, target in zip(row.tolist(), targets.tolist(), strict=True):
            if target not in (IGNORED, EOS, flat[0]):
                assert token == previous[target]


def test_a_share_of_the_documents_is_validated_on_alone() -> None:
    held_out = TokenStream(QUESTIONS, Subset(0.5, 1.0, 3))
    text = validation_windows(held_out, 8)
    (labels,) = (labels for _, labels in text)
    assert sorted(labels[labels != IGNORED].tolist()) != answers(QUESTIONS)
    assert text.bytes == QUESTIONS.document_target_bytes[held_out.chosen].sum()


@pytest.mark.parametrize("length", [3, 8])
def test_validation_without_answers_is_windows(length: int) -> None:
    data = numbered(20)
    text = validation_windows(TokenStream(data), length, rows=2)
    labels = np.concatenate([labels for _, labels in text])
    assert labels[labels != IGNORED].tolist() == data.tokens.tolist()
    assert (text.tokens, text.bytes) == (20, data.manifest.bytes)
