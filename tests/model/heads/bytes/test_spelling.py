"""How tokens are spelled: bytes, numbers in place of bytes, and pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.data.tokenizing.build import SpecialTokens, bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.errors import BraidError
from braidlm.model.heads.bytes.spelling import BYTES, END, NOTHING, SYMBOLS, Spelling


def symbols_of(spelling: Spelling, token: int) -> list[int]:
    """A token's symbols from its pieces, without the end."""
    found = spelling.first(torch.tensor([token]))[0].tolist()
    later = spelling.later(torch.tensor([token]))
    for row in [] if later is None else later.symbols.tolist():
        before, own = row[: spelling.size], row[spelling.size :]
        assert before == found[-spelling.size :], "a later piece is known together with the piece before it"
        found += own
    end = found.index(END)
    assert set(found[end + 1 :]) <= {NOTHING}
    return found[:end]


@given(
    tokens=st.lists(st.none() | st.binary(max_size=12), min_size=1, max_size=40),
    size=st.integers(1, 7),
    more=st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_every_token_of_any_length_is_spelled_and_no_two_alike(
    tokens: list[bytes | None], size: int, more: int
) -> None:
    spelling = Spelling(len(tokens) + more, size, 16)
    spelling.read(tokens)
    assert spelling.agrees_with(tokens)
    found = [tuple(symbols_of(spelling, token)) for token in range(len(tokens) + more)]
    assert len(set(found)) == len(found)
    for token, symbols in zip(tokens, found, strict=False):
        is_first = token and tokens.index(token) == found.index(symbols)
        assert symbols == tuple(token or b"") if is_first else all(BYTES <= symbol < SYMBOLS for symbol in symbols)


def test_tokens_without_bytes_are_numbers_in_base_sixteen() -> None:
    spelling = Spelling(40, 4, 2)
    assert symbols_of(spelling, 0) == [BYTES]
    assert symbols_of(spelling, 15) == [BYTES + 15]
    assert symbols_of(spelling, 37) == [BYTES + 2, BYTES + 5]
    spelling.read([b"a", None, b"bc", b"", b"a"])
    assert [symbols_of(spelling, token) for token in range(5)] == [[97], [BYTES], [98, 99], [BYTES + 1], [BYTES + 2]]


def test_pieces_of_one_token_are_found_alone_and_among_all() -> None:
    spelling = Spelling(4, 3, 16)
    spelling.read([b"abc", b"ab", b"abcdefg", None])
    later = spelling.later()
    assert later is not None
    assert later.tokens.tolist() == [0, 2, 2]
    assert later.symbols[:, 3:].tolist() == [[END, NOTHING, NOTHING], [100, 101, 102], [103, END, NOTHING]]
    alone = spelling.later(torch.tensor([1, 2]))
    assert alone is not None
    assert torch.equal(alone.symbols, later.symbols[1:])
    assert spelling.later(torch.tensor([1, 3])) is None


def test_reading_again_is_noticed() -> None:
    spelling = Spelling(2, 3, 16)
    assert spelling.later() is None
    spelling.read([b"abcd", b"e"])
    later = spelling.later()
    assert later is not None
    assert later.tokens.tolist() == [0]
    assert not spelling.agrees_with([b"abcd", b"f"])
    assert not spelling.agrees_with([b"abc", b"de"])


def test_a_table_that_is_too_small_is_refused() -> None:
    with pytest.raises(BraidError, match="6 bytes on average, and the model has room for 4") as caught:
        Spelling(2, 3, 4).read([b"abcdef", b"ghijkl"])
    assert caught.value.todo == "Set bytes_per_token: 6, in the embedding and in the head."


SPECIAL = SpecialTokens()
TOKENIZERS = {
    "bytes": bytes_tokenizer(),
    "bpe": BraidTokenizer(train_bpe(["the cat sat on the mat, naïve 猫 😀 the the"] * 3, 320, SPECIAL.order), SPECIAL),
}


@given(text=st.text(max_size=30))
@settings(deadline=None)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_spellings_of_a_texts_tokens_are_its_bytes(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    spelling = Spelling(tokenizer.vocab_size, 4, 16)
    spelling.read(tokenizer.token_bytes)
    symbols = [symbol for token in tokenizer.encode(text) for symbol in symbols_of(spelling, token)]
    assert bytes(symbols).decode() == text


def test_special_tokens_have_no_bytes() -> None:
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.eos_id is not None
    assert tokenizer.token_bytes[tokenizer.eos_id] is None
    assert all(token for index, token in enumerate(tokenizer.token_bytes) if index not in (0, 1))
