"""Training a tokenizer within bounds: few enough different words, none too long."""

import random
from collections.abc import Iterator

import pytest

from braidlm.data.tokenizing import build
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, train_bpe, train_tokenizer

SPECIAL = SpecialTokens.parse(["eos=<|endoftext|>"])


def names(seed: int = 0) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield " ".join("".join(rng.choices("abcdefgh", k=8)) for _ in range(200))


def sample(characters: int) -> Iterator[str]:
    for text in names():
        yield text
        characters -= len(text)
        if characters <= 0:
            return


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PART_CHARS", 2000)


def test_too_many_different_words_shrink_the_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "MAX_DISTINCT_BYTES", 20_000)
    asked: list[int] = []

    def watched(characters: int) -> Iterator[str]:
        asked.append(characters)
        return sample(characters)

    tokenizer = train_tokenizer(watched, 100_000, 400, SPECIAL)
    assert tokenizer.vocab_size == 400
    assert asked[0] == 100_000
    assert asked[-1] < 24_000
    assert "the tokenizer was trained on only 0.0 MB of the text" in capsys.readouterr().err


def test_a_text_that_repeats_its_words_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "MAX_DISTINCT_BYTES", 5_000)
    texts = [next(names())] * 50
    sampled = train_tokenizer(lambda characters: texts, 100_000, 400, SPECIAL)
    assert sampled.backend.to_str() == BraidTokenizer(train_bpe(texts, 400, SPECIAL.order), SPECIAL).backend.to_str()
    assert not capsys.readouterr().err


def test_words_that_never_end_are_cut() -> None:
    rng = random.Random(0)
    long_word, spaces = "".join(rng.choices("acgt", k=5000)), " " * 5000
    parts = list(build._parts([f"a {long_word} b", f"a{spaces}b", "an ordinary text"], float("inf")))
    assert "".join(parts) == f"a {long_word} ba{spaces}ban ordinary text"
    assert max(map(len, parts)) <= build.MAX_WORD_CHARS
    assert parts[-1] == "an ordinary text"
