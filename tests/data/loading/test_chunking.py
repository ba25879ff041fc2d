from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import Chunking, Contiguous, ShuffledChunking, Windows, chunkings
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, decode, encode
from tests.data.packed_sets import numbered, packed_data, stream

sizes = st.tuples(st.integers(2, 120), st.integers(1, 40)).filter(lambda pair: pair[0] > pair[1])


@given(sizes, st.integers(0, 5), st.integers(0, 9))
def test_contiguous_shows_each_token_once_but_for_the_remainder(size: tuple[int, int], epoch: int, seed: int) -> None:
    tokens, length = size
    toy = stream(tokens)
    starts = Contiguous().starts(toy, length, epoch, seed)
    assert len(starts) == tokens // length
    shown = Counter(int(t) for start in starts for t in toy.read(start, length)[0])
    assert set(shown.values()) == {1}
    missing = sorted(set(range(1, tokens + 1)) - set(shown))
    assert len(missing) == tokens % length
    # What is left out is one gap of the circle, so no chunk is cut in two.
    assert sum((t % tokens) + 1 not in missing for t in missing) <= 1


@given(sizes, st.integers(0, 9))
def test_contiguous_cuts_every_epoch_elsewhere(size: tuple[int, int], seed: int) -> None:
    tokens, length = size
    toy = stream(tokens)
    epochs = [frozenset(Contiguous().starts(toy, length, e, seed).tolist()) for e in range(min(length, 6))]
    assert len(set(epochs)) == len(epochs)


@given(packed_data(min_documents=3), st.integers(1, 6), st.integers(0, 3))
def test_words_of_an_epoch_are_all_but_the_remainder(data: PackedData, length: int, epoch: int) -> None:
    toy = TokenStream(data)
    if len(toy) <= length:
        return
    starts = Contiguous().starts(toy, length, epoch, 0)
    rows = [toy.read(start, length) for start in starts]
    shown = np.concatenate([tokens for tokens, _ in rows])
    tokens, words = toy.read(0, len(toy))
    left_out = words[~np.isin(tokens, shown)]
    assert len(left_out) == len(toy) % length
    assert sum(int(w.sum()) for _, w in rows) == toy.words - int(left_out.sum())


@given(sizes, st.integers(1, 50))
def test_windows_begin_at_every_stride_and_never_wrap(size: tuple[int, int], stride: int) -> None:
    tokens, length = size
    starts = Windows(Windows.Config(stride=stride)).starts(stream(tokens), length, 0, 0)
    expected = [s for s in range(0, tokens, stride) if s + length < tokens]
    assert sorted(starts.tolist()) == expected


def ending_after(words: int | None, stride: int) -> ShuffledChunking:
    """Windows, or contiguous chunks where the stride is 0."""
    return Windows(Windows.Config(words, stride=stride)) if stride else Contiguous(Contiguous.Config(words))


@given(packed_data(min_documents=4), st.integers(1, 6), st.integers(0, 3), st.integers(1, 60))
def test_an_epoch_ends_with_the_chunk_that_completes_its_words(
    data: PackedData, length: int, stride: int, words: int
) -> None:
    toy = TokenStream(data)
    if len(toy) <= length:
        return
    every = ending_after(None, stride).starts(toy, length, 3, 1)
    some = ending_after(words, stride).starts(toy, length, 3, 1)
    counts = [int(toy.read(s, length)[1].sum()) for s in every]
    assert every[: len(some)].tolist() == some.tolist()
    assert sum(counts[: len(some) - 1]) < words
    assert sum(counts[: len(some)]) >= words or len(some) == len(every)


def test_words_per_epoch_is_exact_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Windows(Windows.Config(200, stride=3)).starts(stream(1000), 16, 0, 0)
    monkeypatch.setattr("braidlm.data.loading.chunking._TOKENS_PER_BLOCK", 40)
    assert Windows(Windows.Config(200, stride=3)).starts(stream(1000), 16, 0, 0).tolist() == whole.tolist()


@given(packed_data(min_documents=4), st.integers(1, 6), st.integers(0, 3), st.integers(1, 60))
def test_the_last_chunk_of_an_epoch_ends_with_its_last_word(
    data: PackedData, length: int, stride: int, words: int
) -> None:
    toy = TokenStream(data)
    if len(toy) <= length:
        return
    chunking = ending_after(words, stride)
    starts = chunking.starts(toy, length, 0, 0)
    *full, last = chunking.trained_lengths(toy, starts, length)
    assert full == [length] * (len(starts) - 1)
    assert 1 <= last <= length
    before = sum(int(toy.read(s, length)[1].sum()) for s in starts[:-1])
    shown = toy.read(starts[-1], length)[1]
    assert last == length or shown[last] > 0, "the word after the last one comes next"
    over = before + int(shown[:last].sum()) - words
    assert over < max(shown.max(), 1), "only a token in which several words begin may be too much"
    assert over >= 0 or last == length


def test_a_stream_with_too_few_words_gives_a_warning_before_it_is_cut() -> None:
    toy = stream(300)  # 100 words
    assert Windows(Windows.Config(100, stride=8)).warning(toy, 8) is None
    assert Windows(Windows.Config(stride=8)).warning(toy, 8) is None
    assert Contiguous().warning(toy, 8) is None
    assert Contiguous(Contiguous.Config(100)).warning(toy, 8) is None
    text = Contiguous(Contiguous.Config(250)).warning(toy, 8)
    assert text is not None
    assert "epochs repeat sooner. Each ends when every chunk was shown, after 98 words" in text
    text = Windows(Windows.Config(250, stride=2)).warning(toy, 8)
    assert text is not None
    assert "'toy' has 100 words, and an epoch should show 250: chunks overlap, and an epoch repeats each word" in text
    assert "2.5 times" in text
    text = Windows(Windows.Config(250, stride=8)).warning(toy, 8)
    assert text is not None
    assert "epochs repeat sooner. Each ends when every chunk was shown, after 99 words" in text
    text = Windows(Windows.Config(90, stride=16)).warning(toy, 8)
    assert text is not None
    assert "100 words, and an epoch should show 90: epochs repeat sooner" in text, "windows that leave text out"


@pytest.mark.parametrize("chunking", [Contiguous(), Windows(Windows.Config(stride=5))])
def test_an_epoch_depends_on_seed_name_and_number_only(chunking: Chunking) -> None:
    def order(name: str = "a", epoch: int = 0, seed: int = 0) -> list[int]:
        return chunking.starts(stream(500, name), 10, epoch, seed).tolist()

    assert order() == order()
    orders = [order(), order(name="b"), order(epoch=1), order(seed=1)]
    assert len({tuple(o) for o in orders}) == 4
    assert all(o != sorted(o) for o in orders)


def test_the_order_is_the_same_on_every_machine() -> None:
    """These numbers must never change: a resumed run would read other data."""
    assert Contiguous().starts(stream(60), 10, 2, 7).tolist() == [18, 48, 8, 28, 58, 38]
    assert Windows(Windows.Config(stride=9)).starts(stream(60), 10, 2, 7).tolist() == [18, 27, 45, 0, 36, 9]
    assert Subset(0, 0.5, 3).choose(10).tolist() == [0, 4, 5, 6, 8]


@pytest.mark.parametrize("name", list(chunkings))
def test_every_chunking_is_sound(name: str) -> None:
    """The contract of whatever is registered."""
    options = {"windows": {"stride": 4}}.get(name, {})
    chunking = chunkings.build(decode(Holder, {"chunking": {"kind": name, **options}}).chunking)
    starts = chunking.starts(stream(100), 8, 0, 0)
    assert len(starts) > 0
    assert starts.dtype == np.int64
    assert 0 <= starts.min() <= starts.max() < 100
    assert chunking.as_dict() == {"kind": name, **options}


@dataclass
class Holder:
    chunking: Annotated[Choice, PartOf(chunkings, "contiguous")] = "contiguous"  # type: ignore[assignment]


def test_configurations_decode_strictly() -> None:
    assert decode(Holder, {}).chunking.kind == "contiguous"
    windows = decode(Holder, {"chunking": {"kind": "windows", "stride": 3, "words_per_epoch": 100}})
    assert windows.chunking.options == Windows.Config(100, stride=3)
    assert decode(Holder, encode(windows)) == windows
    for data, problem in [
        ({"kind": "windows"}, "chunking.stride: missing; it has no default"),
        ({"kind": "windows", "stride": 0}, "chunking.stride: expected a whole number from 1 to"),
        ({"kind": "windows", "stride": 1, "words_per_epoch": 0}, "chunking.words_per_epoch: expected a whole number"),
        ({"kind": "window"}, "chunking: unknown chunking 'window'. Did you mean 'windows'?"),
        ({"kind": "windows", "strid": 1, "stride": 1}, "chunking: unknown key 'strid'. Did you mean 'stride'?"),
    ]:
        with pytest.raises(BraidError) as caught:
            decode(Holder, {"chunking": data})
        assert problem in str(caught.value)


def test_a_short_stream_says_what_it_has_and_what_to_do() -> None:
    Contiguous().check(stream(9), 8)
    with pytest.raises(BraidError) as caught:
        Contiguous().check(stream(8), 8)
    assert "data set 'toy'" in str(caught.value)
    assert "the data set has 8 tokens, but a chunk of length 8 needs 9" in str(caught.value)
    assert "Prepare more text, or choose a length of at most 7." in str(caught.value)
    with pytest.raises(BraidError, match="has 21 tokens in the chosen part"):
        Contiguous().check(TokenStream(numbered(42), Subset(0, 0.5)), 30)
