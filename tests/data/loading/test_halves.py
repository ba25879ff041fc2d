"""The halves of held-out text: together the whole, in blocks of neighbours, whatever the tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig, DataSetConfig, TokenizerConfig
from braidlm.data.loading.halves import BLOCK_BYTES, Half, documents_of_half
from braidlm.data.loading.open_data import open_data
from braidlm.data.loading.streams import TokenStream
from braidlm.data.tokenizing.tokenizer import BraidTokenizer

sizes = st.lists(st.integers(0, 2 * BLOCK_BYTES), min_size=1, max_size=40).filter(
    lambda drawn: sum(drawn[:-1]) >= BLOCK_BYTES
)


@given(sizes)
def test_each_document_is_in_one_half(drawn: list[int]) -> None:
    choose, report = (documents_of_half(drawn, half, "here") for half in get_args(Half))
    assert sorted([*choose, *report]) == list(range(len(drawn)))


@given(sizes)
def test_neighbours_stay_together(drawn: list[int]) -> None:
    choose = set(documents_of_half(drawn, "choose", "here"))
    blocks, is_chosen = [0], True
    for document, size in enumerate(drawn):
        if (document in choose) != is_chosen:
            blocks, is_chosen = [*blocks, 0], not is_chosen
        blocks[-1] += size
    assert all(BLOCK_BYTES <= block < 3 * BLOCK_BYTES for block in blocks[:-1])


def test_too_little_text() -> None:
    for half in get_args(Half):  # both, so that nobody chooses on a half whose other half is empty
        with pytest.raises(BraidError, match="too short for two halves"):
            documents_of_half([BLOCK_BYTES], half, "here")


def text_of(stream: TokenStream, tokenizer: BraidTokenizer) -> str:
    tokens, _ = stream.read(0, len(stream))
    return tokenizer.decode([int(token) for token in tokens if token != tokenizer.eos_id])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A transcript without blank lines, and short documents."""
    for split in ("train", "dev"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "talk.txt").write_text("\n".join(f"{split} utterance {n} ü" for n in range(1500)))
        (tmp_path / split / "tales.txt").write_text("\n\n".join(f"A {split} tale.\nNumber {n}." for n in range(1500)))
    return tmp_path


def test_the_halves_of_files_are_the_whole(corpus: Path) -> None:
    data_set, tokenizer = DataSetConfig(folder=str(corpus)), TokenizerConfig("bytes")
    config = DataConfig({"text": data_set}, tokenizer=tokenizer, cache=str(corpus / "cache"))
    whole = open_data(config)
    choose, report = (open_data(config, half) for half in get_args(Half))
    streams = [opened.validation[0] for opened in (whole, choose, report)]
    assert streams[0].bytes == streams[1].bytes + streams[2].bytes
    assert streams[0].words == streams[1].words + streams[2].words
    assert abs(streams[1].bytes - streams[2].bytes) < 2 * BLOCK_BYTES
    assert [stream.fingerprint() for stream in choose.train] == [stream.fingerprint() for stream in whole.train]
    texts = [text_of(stream, whole.tokenizer) for stream in streams]
    assert sorted(texts[0]) == sorted(texts[1] + texts[2])
    for text in texts[1:]:  # every file is in both halves
        assert "utterance" in text
        assert "tale" in text
    lines = [line for text in texts[1:] for line in text.splitlines() if "utterance" in line]
    assert len(set(lines)) == 1500  # no line was cut


def test_the_text_alone_says_which_half(corpus: Path) -> None:
    config = DataConfig({"text": DataSetConfig(folder=str(corpus))}, cache=str(corpus / "cache"))
    texts = []
    for tokenizer in (TokenizerConfig("bpe", vocab_size=300), TokenizerConfig("bytes")):
        opened = open_data(replace(config, tokenizer=tokenizer), "report")
        texts.append(text_of(opened.validation[0], opened.tokenizer))
    assert texts[0] == texts[1]


def test_held_out_documents_have_halves(tmp_path: Path) -> None:
    data_set = DataSetConfig(source="stories", documents=400, holdout=0.3)
    config = DataConfig({"stories": data_set}, tokenizer=TokenizerConfig("bytes"), cache=str(tmp_path))
    whole = open_data(config).validation[0].chosen
    choose, report = (open_data(config, half).validation[0].chosen for half in get_args(Half))
    assert sorted([*choose, *report]) == whole.tolist()
