import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.packed_data import PackedData
from braidlm.model.config.strict import decode
from tests.data.packed_sets import numbered, pack, packed_data


def slow_tokens(stream: TokenStream) -> tuple[list[int], list[int]]:
    """The reference: every chosen document copied out one by one."""
    data, tokens, words = stream.data, [], []
    for d in stream.subset.choose(data.manifest.documents):
        span = slice(data.document_starts[d], data.document_starts[d + 1])
        tokens += data.tokens[span].tolist()
        words += data.word_starts[span].tolist()
    return tokens, words


@st.composite
def streams(draw: st.DrawFn) -> TokenStream:
    data = draw(packed_data(min_documents=4))
    start, stop = sorted(draw(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda p: p[0] != p[1])))
    return TokenStream(data, Subset(start / 4, stop / 4, draw(st.integers(0, 3))))


@given(streams(), st.integers(0, 200), st.integers(1, 200))
def test_a_read_is_the_slice_of_the_endless_repetition(stream: TokenStream, start: int, length: int) -> None:
    tokens, words = slow_tokens(stream)
    assert len(stream) == len(tokens)
    got_tokens, got_words = stream.read(start, length)
    at = [(start + i) % len(tokens) for i in range(length)]
    assert got_tokens.tolist() == [tokens[i] for i in at]
    assert got_words.tolist() == [words[i] for i in at]


@given(streams(), st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(1, 40))
def test_many_rows_are_read_as_one_by_one(stream: TokenStream, starts: list[int], length: int) -> None:
    positions = stream.positions(np.array(starts), length)
    rows = [stream.read(start, length) for start in starts]
    assert np.array_equal(stream.tokens_at(positions), [tokens for tokens, _ in rows])
    assert np.array_equal(stream.word_starts_at(positions), [words for _, words in rows])
    assert stream.tokens_at(positions).dtype == np.int64
    assert stream.word_starts_at(positions).dtype == np.uint8


@given(packed_data(min_documents=2), st.floats(0.01, 0.99), st.integers(0, 5))
def test_two_parts_never_overlap_and_are_everything(data: PackedData, cut: float, seed: int) -> None:
    documents = data.manifest.documents
    first = Subset(0.0, cut, seed).choose(documents)
    second = Subset(cut, 1.0, seed).choose(documents)
    assert sorted([*first, *second]) == list(range(documents))
    assert list(first) == sorted(first)
    assert abs(len(first) - cut * documents) <= 0.5


@given(streams())
def test_totals_are_those_of_the_chosen_documents(stream: TokenStream) -> None:
    chosen = stream.subset.choose(stream.data.manifest.documents)
    assert stream.documents == len(chosen)
    assert stream.words == stream.read(0, len(stream))[1].sum()
    assert stream.bytes == stream.data.document_bytes[chosen].sum()


def test_the_split_depends_on_its_seed_and_not_on_the_name() -> None:
    parts = [TokenStream(numbered(700, name), Subset(0, 0.6, seed)) for name, seed in [("a", 1), ("b", 1), ("a", 2)]]
    rows = [part.read(0, 100)[0].tolist() for part in parts]
    assert rows[0] == rows[1] != rows[2]


def test_a_whole_set_reads_nothing_of_the_document_index() -> None:
    data = numbered(100)
    (data.folder / "documents.bin").unlink()
    assert TokenStream(data).read(98, 4)[0].tolist() == [99, 100, 1, 2]


def test_documents_without_tokens_do_no_harm() -> None:
    data = pack([[], [1, 2], [], [3], [], [4, 5, 6], []])
    stream = TokenStream(data, Subset(0, 0.99))
    tokens, _ = slow_tokens(stream)
    assert stream.read(0, 2 * len(tokens))[0].tolist() == tokens * 2


def test_large_vocabularies_are_read_exactly() -> None:
    stream = TokenStream(pack([[70_000, 9_000_000, 3]], dtype="uint32"))
    assert stream.tokens_at(stream.positions(np.array([1]), 3)).tolist() == [[9_000_000, 3, 70_000]]


@pytest.mark.parametrize(("start", "stop"), [(0.5, 0.5), (0.6, 0.4), (-0.1, 0.5), (0.5, 1.1)])
def test_an_impossible_part_is_refused(start: float, stop: float) -> None:
    with pytest.raises(BraidError, match=r"subset: a subset needs start < stop|subset.st.*: expected a number from 0"):
        decode(Subset, {"start": start, "stop": stop}, "subset")


def test_an_empty_part_says_how_many_documents_there_are() -> None:
    with pytest.raises(BraidError, match=r"the part from 0 to 0.1 of 2 documents is empty\nTake a larger part"):
        TokenStream(numbered(14), Subset(0, 0.1))


@given(streams(), st.integers(1, 12), st.integers(1, 3), st.none() | st.integers(1, 60))
def test_validation_predicts_every_token_of_whole_documents_once(
    stream: TokenStream, length: int, rows: int, max_tokens: int | None
) -> None:
    windows = validation_windows(stream, length, max_tokens, rows)
    batches = list(windows)
    assert len(batches) == len(windows)
    assert {a.shape for pair in batches for a in pair} == {(rows, length)}
    inputs = np.concatenate([i.ravel() for i, _ in batches])
    labels = np.concatenate([row.ravel() for _, row in batches])
    trained = labels != -100
    tokens, _ = slow_tokens(stream)
    assert labels[trained].tolist() == tokens[: windows.tokens]
    assert inputs[trained].tolist() == [0, *tokens[: windows.tokens - 1]]

    data, chosen = stream.data, stream.subset.choose(stream.data.manifest.documents)
    ends = np.cumsum(np.diff(data.document_starts)[chosen])
    count = ends.tolist().index(windows.tokens) + 1  # the end of a document
    if max_tokens is None:
        assert count == len(chosen)
    else:
        assert windows.tokens <= max_tokens or count == 1
        assert count == len(chosen) or ends[count] > max_tokens
    assert windows.words == data.document_words[chosen[:count]].sum()
    assert windows.bytes == data.document_bytes[chosen[:count]].sum()


def test_validation_refuses_empty_data() -> None:
    with pytest.raises(BraidError, match="nothing to validate on"):
        validation_windows(TokenStream(pack([[]])), 8)
