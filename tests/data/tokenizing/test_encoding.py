"""Exact words per token, for any text and any tokenizer."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.encoding import Packer, TextBatch

SPACES = " \t\n\x0b\x0c\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
TEXTS = st.text(st.one_of(st.sampled_from(SPACES + "ab'.1éß你𝄞👩\u0301"), st.characters(exclude_categories=["Cs"])))


def lossy() -> BraidTokenizer:
    """Lower-cases, drops characters and knows three words: its tokens do not spell the text."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.Replace("é", ""), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return BraidTokenizer(backend, SpecialTokens(eos="</s>", bos=None, pad=None))


def prefixed() -> BraidTokenizer:
    """Byte-level, with a space put before every text."""
    backend = train_bpe(["a b ab abab é 你"] * 3, 300)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return BraidTokenizer(backend, SpecialTokens())


PACKERS = {
    "bpe": Packer(BraidTokenizer(train_bpe(["ab ab' a.1 é 你 b\n\n"] * 3, 290), SpecialTokens())),
    "bytes": Packer(bytes_tokenizer()),
    "lossy": Packer(lossy()),
    "prefixed": Packer(prefixed()),
}


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_words_of_tokens_sum_to_the_words_of_each_document(name: str, texts: list[str]) -> None:
    texts = [text for text in texts if text.strip()] or ["a b"]
    batch = PACKERS[name].pack(texts, [True] * len(texts))
    kept = [text for text in texts if PACKERS[name].tokenizer.encode(text)]
    assert batch.texts[:, 1].tolist() == [len(text.split()) for text in kept]
    assert batch.texts[:, 2].tolist() == [len(text.encode()) for text in kept]
    assert len(batch.tokens) == len(batch.words) == batch.texts[:, 0].sum()
    ends = np.cumsum(batch.texts[:, 0])
    for end, length, words in zip(ends, batch.texts[:, 0], batch.texts[:, 1], strict=True):
        assert batch.words[end - length : end].sum() == words
        assert batch.tokens[end - 1] == PACKERS[name].tokenizer.eos_id


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_words_begin_in_the_token_that_holds_their_first_byte(text: str) -> None:
    text += "a"
    raw = text.encode()
    batch = PACKERS["bytes"].pack([text], [True])
    begins, at = [], 0
    for word in text.split():
        at = text.index(word, at)
        begins.append(len(text[:at].encode()))
        at += len(word)
    assert np.flatnonzero(batch.words).tolist() == begins
    assert bytes(batch.tokens[:-1].astype(np.uint8)) == raw


def test_plain_bytes_fast_path_equals_the_tokenizer() -> None:
    text = "Zoë said:\t你好 <|endoftext|>\n"
    assert PACKERS["bytes"].pack([text], [False]).tokens.tolist() == bytes_tokenizer().encode(text)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    assert TextBatch(["ab c"]).words_by_length(np.array([1, 1]), np.array([2])) is None


def test_a_token_of_more_words_than_a_byte_counts_is_an_error() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    packer = Packer(BraidTokenizer(backend, SpecialTokens(eos=None, bos=None, pad=None)))
    with pytest.raises(BraidError, match="tokens that stand for more than 255 words"):
        packer.pack(["a " * 300], [True])


@pytest.mark.parametrize("name", ["bpe", "bytes"])
@settings(max_examples=100, deadline=None)
@given(text=TEXTS.filter(lambda text: len(text) > 1), cuts=st.lists(st.integers(0, 30)))
def test_a_document_in_parts_has_the_words_of_the_whole(name: str, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:stop] for start, stop in pairwise(places)]
    within_word = [False, *(not (a[-1].isspace() or b[0].isspace()) for a, b in pairwise(parts))]
    batch = PACKERS[name].pack(parts, [False] * (len(parts) - 1) + [True], within_word)
    assert batch.words.sum() == batch.texts[:, 1].sum() == len(text.split())
    assert batch.texts[:, 2].sum() == len(text.encode())
