"""Every document as one row: what a row holds, in every epoch the same; what is left out; shares, epochs, messages."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import IGNORED
from braidlm.data.loading.chunking import Contiguous, Single, Windows, chunkings
from braidlm.data.loading.config import MixtureConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from tests.data.packed_sets import EOS, answered_data, pack, packed_data, stream


def rows_of(data: TokenStream, length: int, batches: int, rows: int = 2) -> list[tuple[tuple[int, ...], ...]]:
    """Inputs and labels of the rows of some batches."""
    loader = Loader([data], Single(), length, rows)
    drawn = [loader.next_batch() for _ in range(batches)]
    return [tuple(map(tuple, row)) for one in drawn for row in np.stack([one.inputs, one.labels], axis=1).tolist()]


def row_of(document: list[int], length: int) -> tuple[tuple[int, ...], ...]:
    """The row of one document, by hand."""
    tokens, filling = [document[-1], *document][: length + 1], [document[-1]] * length
    inputs = (tokens + filling)[:length] if len(tokens) <= length else tokens[:length]
    return tuple(inputs), tuple((tokens[1:] + [IGNORED] * length)[:length])


@given(packed_data(min_documents=3), st.integers(1, 12), st.booleans())
def test_a_row_is_one_document_and_holds_nothing_else(data: PackedData, length: int, is_part: bool) -> None:
    text = TokenStream(data, Subset(0.3, 1) if is_part else None)
    if len(text) <= length:
        return
    starts = data.document_starts
    documents = [data.tokens[starts[n] : starts[n + 1]].tolist() for n in text.chosen]
    epoch = rows_of(text, length, batches=len(documents), rows=1)
    assert sorted(epoch) == sorted(row_of(document, length) for document in documents)


@given(packed_data(min_documents=4), st.integers(1, 6), st.integers(0, 3))
def test_rows_are_the_same_in_every_epoch_in_another_order(data: PackedData, length: int, seed: int) -> None:
    text = TokenStream(data)
    orders = [Single().starts(text, length, epoch, seed).tolist() for epoch in range(6)]
    assert all(sorted(order) == text.document_bounds[:-1].tolist() for order in orders)
    assert len(set(map(tuple, orders))) > 1


def test_only_such_rows_have_a_unit() -> None:
    assert Single().unit(8) == "document"
    assert Windows(Windows.Config(stride=9)).unit(8) == "row"
    assert Windows(Windows.Config(stride=8)).unit(8) is None, "the last label is the first input of the next row"
    others = [name for name in chunkings if name not in ("single", "windows")]
    assert [chunkings[name]().unit(8) for name in others] == [None] * len(others)


@given(st.integers(2, 40), st.integers(1, 8))
def test_windows_that_have_a_unit_share_no_token(tokens: int, length: int) -> None:
    text = stream(tokens + length)
    windows = Windows(Windows.Config(stride=length + 1))
    epochs = [windows.starts(text, length, epoch, 0) for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    read = text.positions(epochs[0], length + 1).ravel()
    assert len(set(read.tolist())) == read.size


def test_the_end_of_long_documents_is_left_out_and_told() -> None:
    text = TokenStream(pack([[*range(1, size), EOS] for size in (3, 8, 20)]))
    assert Single().tokens(text, 8) == 3 + 8 + 8
    assert Single().warning(text, 20) is None
    told = "data set 'toy': 1 of 3 documents are longer than 8 tokens; what follows is never read: 12 of 31 tokens"
    assert Single().warning(text, 8) == told


@given(answered_data(), st.integers(1, 6))
def test_prompts_have_no_labels(data: PackedData, length: int) -> None:
    loader = Loader([TokenStream(data)], Single(), length, 1)
    starts, targets = data.document_starts, data.targets
    counts = [int(targets[a : min(a + length, b)].sum()) for a, b in pairwise(starts.tolist())]
    drawn = [loader.next_batch() for _ in counts]
    assert sorted(int((batch.labels != IGNORED).sum()) for batch in drawn) == sorted(counts)


def test_data_sets_share_a_batch_by_their_documents() -> None:
    short = TokenStream(pack([[n, EOS] for n in range(1, 31)], name="short"))
    long = TokenStream(pack([[*range(100, 109), EOS]] * 10, name="long"))
    loader = Loader([short, long], Single(), 8, 4)
    assert loader.rates == pytest.approx({"long": 0.1, "short": 0.1})
    assert loader.tokens_per_epoch == 60 + 80
    assert loader.tokens_per_step == 14
    weighted = Loader([short, long], Single(), 8, 4, mix=MixtureConfig(weights={"short": 1, "long": 1}))
    assert weighted.rates == pytest.approx({"long": 0.2, "short": 2 / 30})
    rows = Loader([stream(90)], Contiguous(), 8, 3)
    assert (rows.rates, rows.tokens_per_step, rows.tokens_per_epoch) == ({"toy": 3 / 11}, 24, 90)


def test_documents_that_nothing_ends_are_refused() -> None:
    whole = pack([[1, 2, EOS], [3, EOS]])
    Single().check(TokenStream(whole), 8)
    for change in ({"eos_id": None}, {"source": {"reading": {"chunk_tokens": 8}}}):
        data = PackedData(whole.folder, replace(whole.manifest, **change))
        with pytest.raises(BraidError, match="no token ends the documents of this data set"):
            Single().check(TokenStream(data), 8)
