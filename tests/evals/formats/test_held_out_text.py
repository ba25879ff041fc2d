"""Bits per byte of text: each token once, per file and in all, the same as the validation of a run."""

import math
from pathlib import Path

import pytest
from plain_scorer import plain_sum

from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import TokenStream
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.held_out_text import read_text
from braidlm.evals.scoring.scorer import Scorer
from braidlm.training.validation import score_text
from tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()
CONTEXT = 16
TEXTS = {"a.txt": "One day.\nA cat sat.\n\nThe end, ü.\n", "deep/b.txt": "Nothing at all happened to anybody here.\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    return tmp_path / "text"


def scorer() -> Scorer:
    return Scorer(tiny_model(vocab_size=TOKENIZER.vocab_size, context=CONTEXT, positions="learned"))


def plain_bits(documents: list[str]) -> float:
    """Window by window, straight from the definition."""
    eos = TOKENIZER.eos_id
    assert eos is not None
    stream = [eos, *(token for text in documents for token in [*TOKENIZER.encode(text), eos])]
    windows = [stream[at : at + CONTEXT + 1] for at in range(0, len(stream) - 1, CONTEXT)]
    return -sum(plain_sum(scorer().model, window) for window in windows) / math.log(2)


def test_every_token_is_predicted_once(folder: Path) -> None:
    held = read_text(folder)
    result = held.evaluate("bits_per_byte", EvaluatedModel(scorer(), TOKENIZER))
    a, b = ["One day.\nA cat sat.", "The end, ü."], ["Nothing at all happened to anybody here."]
    sizes = [sum(len(text.encode()) for text in texts) for texts in (a, b)]
    bits = [plain_bits(a), plain_bits(b)]
    assert result.score == pytest.approx(sum(bits) / sum(sizes), abs=1e-5)
    assert {name: part.count for name, part in result.parts.items()} == {"a.txt": 2, "deep/b.txt": 1}
    assert result.parts["a.txt"].score == pytest.approx(bits[0] / sizes[0], abs=1e-5)
    assert result.parts["deep/b.txt"].score == pytest.approx(bits[1] / sizes[1], abs=1e-5)
    assert result.notes == {"tokens": sum(sizes) + 3, "bytes": sum(sizes), "window": CONTEXT}
    assert (result.higher_is_better, result.count, result.chance) == (False, 3, None)
    assert result.standard_error is not None
    assert result.standard_error > 0


def test_it_is_what_the_validation_of_a_run_says(folder: Path, tmp_path: Path) -> None:
    file = folder / "a.txt"
    prepare([file], tmp_path / "packed", tokenizer="bytes")
    stream = TokenStream(PackedData(tmp_path / "packed"))
    expected = score_text(scorer().model, validation_windows(stream, CONTEXT))
    found = read_text(file).evaluate("bits_per_byte", EvaluatedModel(scorer(), TOKENIZER))
    assert found.score == pytest.approx(expected.bits_per_byte, abs=1e-6)
    assert (found.notes["tokens"], found.notes["bytes"]) == (expected.tokens, expected.bytes)


def test_one_document_has_no_standard_error(folder: Path) -> None:
    result = read_text(folder / "deep").evaluate("t", EvaluatedModel(scorer(), TOKENIZER))
    assert result.standard_error is None
    assert "±" not in result.shown


def test_the_hash_follows_the_text(folder: Path) -> None:
    before = read_text(folder).sha256
    (folder / "a.txt").write_text("Another.")
    assert read_text(folder).sha256 != before


def test_places_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(BraidError, match="there is no text in it"):
        read_text(tmp_path / "empty.txt")
    with pytest.raises(BraidError, match="there is no such file"):
        read_text(tmp_path / "none.txt")
