"""Chunks of tokens in place of documents."""

from pathlib import Path

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import load_tokenizer


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_chunks_in_place_of_documents(tmp_path: Path, tokenizer: str) -> None:
    options = {"documents": 60, "workers": 1, "tokenizer": tokenizer, "shard_mb": 0.02}
    whole = prepare("stories", tmp_path / "whole", **options)
    data = prepare("stories", tmp_path / "chunks", chunk_tokens=50, **options)
    assert np.array_equal(whole.tokens, data.tokens)
    assert (whole.manifest.words, whole.manifest.bytes) == (data.manifest.words, data.manifest.bytes)
    lengths = np.diff(data.document_starts)
    assert 60 < data.manifest.documents == len(lengths) == len(data.document_words)
    assert set(lengths[:20]) == {50}
    assert (lengths == 50).mean() > 0.9  # the last of each shard is shorter
    tokenizer_of = load_tokenizer(data.tokenizer_folder)
    texts = [tokenizer_of.decode(data.tokens[start:stop], skip_special_tokens=True) for start, stop in _bounds(data)]
    assert [len(text.encode()) for text in texts] == data.document_bytes.tolist()  # stories are ASCII
    words = [int(data.word_starts[start:stop].sum()) for start, stop in _bounds(data)]
    assert words == data.document_words.tolist()


def _bounds(data: PackedData) -> list[tuple[int, int]]:
    return list(zip(data.document_starts[:-1].tolist(), data.document_starts[1:].tolist(), strict=True))


def test_chunks_that_cannot_be(tmp_path: Path) -> None:
    reading = {"documents": 5, "workers": 1, "tokenizer": "bytes"}
    with pytest.raises(BraidError, match="cut answers off"):
        prepare("maths", tmp_path / "a", fields="question", answer="answer", chunk_tokens=9, **reading)
