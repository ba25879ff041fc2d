"""Long texts in parts: the tokens of the whole, wherever they can be, and parts of bounded length."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from braidlm.data.corpora.builtin import document
from braidlm.data.tokenizing import encoding
from braidlm.data.tokenizing.build import BraidTokenizer, SpecialTokens, bytes_tokenizer, train_bpe
from braidlm.data.tokenizing.encoding import Cutter
from braidlm.data.tokenizing.tokenizer import BETWEEN_LINES

ENGLISH = "\n\n".join(document(corpus, 0, number) for number in range(60) for corpus in ("stories", "maths"))
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
CODE = Path(encoding.__file__).read_text(encoding="utf-8")
CHINESE = "".join(f"小狐狸去了第{number}个城市。那里有很多人，他们说：“你好！”\n" for number in range(400))
TEXTS = {"english": ENGLISH, "markdown": README, "code": CODE * 4, "chinese": CHINESE}


def tokenizer(text: str = ENGLISH, pre_tokenizer: object = None, normalizer: object = None) -> BraidTokenizer:
    backend = train_bpe([text[at : at + 2000] for at in range(0, len(text), 2000)], 600)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    return BraidTokenizer(backend, SpecialTokens())


BPE = tokenizer()
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PART_CHARS", 300)
    monkeypatch.setattr(encoding, "MAX_PART_CHARS", 2400)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["gpt-2", "llama-3", "bytes", "prefix space", "spaces of lines", "nfc", "no words"])
def test_parts_of_real_text_give_the_tokens_of_the_whole(name: str, kind: str) -> None:
    text = TEXTS[name]
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cutter = Cutter(
        {
            "gpt-2": lambda: tokenizer(text),
            "llama-3": lambda: tokenizer(text, pre_tokenizers.Sequence([split, byte_level])),
            "bytes": bytes_tokenizer,
            "prefix space": lambda: tokenizer(text, pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "spaces of lines": lambda: tokenizer(
                text, pre_tokenizers.ByteLevel(add_prefix_space=True), normalizers.Replace(*BETWEEN_LINES)
            ),
            "nfc": lambda: tokenizer(text, normalizer=normalizers.NFC()),
            "no words": lambda: tokenizer(text, byte_level),
        }[kind]()
    )
    parts = list(cutter.parts([text]))
    assert "".join(parts) == text
    assert len(parts) > len(text) // 3000
    assert max(map(len, parts)) <= 2400
    if name == "chinese" and kind in ("prefix space", "spaces of lines"):
        assert cutter.unsafe > 0  # a space is put before every part, and this text has none that could be it
    else:
        assert cutter.unsafe == 0
        assert cutter.encode(text) == cutter.tokenizer.encode(text)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=40))
def test_parts_do_not_depend_on_the_pieces(sizes: list[int]) -> None:
    text, pieces, start = ENGLISH[:9000], [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    assert list(Cutter(BPE).parts([*pieces, text[start:]])) == list(Cutter(BPE).parts([text]))


@pytest.mark.parametrize("text", ["x" * 10_000, "🦊" * 10_000, "e" + "\u0301" * 10_000, "=" * 10_000, "\0" * 10_000])
def test_a_text_without_a_place_to_cut_is_cut_all_the_same(text: str) -> None:
    cutter = Cutter(tokenizer(text))
    parts = list(cutter.parts([text]))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 2400 + 300 + encoding.AROUND
    assert cutter.tokenizer.decode(cutter.encode(text)) == text


def test_a_cut_that_changes_tokens_is_counted() -> None:
    cutter = Cutter(tokenizer("xyxxyxyy" * 1000))
    list(cutter.parts(["xyxxyxyy" * 1000 + "x"]))
    assert cutter.unsafe > 0
    short = Cutter(cutter.tokenizer)
    assert list(short.parts(["xyxxyxyy" * 10])) == ["xyxxyxyy" * 10]
    assert short.unsafe == 0
