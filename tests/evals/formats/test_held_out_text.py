"""Bits per byte of text: each token once, per file and in all, the same as the validation of a run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.prepare import prepare
from braidlm.data.sources.text import parse_separators
from braidlm.data.tokenizing.build import bytes_tokenizer, load_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.held_out_text import read_text
from braidlm.evals.scoring.scorer import Scorer
from braidlm.training.monitoring.reporter import score_text
from braidlm.training.trainable import TrainableBraid
from tests.evals.plain_scorer import plain_sum
from tests.tiny_models import tiny_model

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
    assert result.score == pytest.approx(plain_bits([*a, *b]) / sum(sizes), abs=1e-5)
    assert {name: part.count for name, part in result.parts.items()} == {"a.txt": 2, "deep/b.txt": 1}
    first = result.parts["a.txt"].score
    assert first == pytest.approx(plain_bits(a) / sizes[0], abs=1e-5)
    assert result.parts["deep/b.txt"].score * sizes[1] == pytest.approx(
        result.score * sum(sizes) - first * sizes[0], abs=1e-3
    )
    assert result.notes == {"tokens": sum(sizes) + 3, "bytes": sum(sizes), "window": CONTEXT}
    assert (result.higher_is_better, result.count, result.chance) == (False, 3, None)
    assert result.standard_error is not None
    assert result.standard_error > 0


ROWS = [{"q": f"What is {n}?", "a": f"It is {n}, and “{n}” it stays."} for n in range(30)]
SAME_TEXT: dict[str, dict[str, Any]] = {
    "blank lines": {},
    "lines": {"separator": ("lines",)},
    "a marker": {"separator": ("day.",)},
    "one file": {"separator": ("file",)},
    "by file": {"separator": ("a.txt=lines", "b.*=file")},
    "fields": {"field": ("q", "a"), "joiner": " -> "},
    "a window": {"window": 7},
    "the first tokens": {"max_tokens": 40},
}


@pytest.mark.parametrize("case", SAME_TEXT)
@pytest.mark.parametrize("packed", [False, True], ids=["text", "packed"])
def test_it_is_what_the_validation_of_a_run_says(folder: Path, tmp_path: Path, case: str, packed: bool) -> None:
    options = SAME_TEXT[case]
    if case == "fields":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    data = prepare(
        folder,
        tmp_path / "packed",
        tokenizer="bytes",
        separator=parse_separators(options.get("separator", ())),
        fields=options.get("field", ("text",)),
        joiner=options.get("joiner", "\n"),
        workers=1,
    )
    windows = validation_windows(TokenStream(data), options.get("window", CONTEXT), options.get("max_tokens"))
    expected = score_text(TrainableBraid(scorer().model), windows)
    settings = Settings(**options)
    model = EvaluatedModel(scorer(), TOKENIZER, settings=settings)
    found = read_text(data.folder if packed else folder, settings).evaluate("bits_per_byte", model)
    assert found.score == pytest.approx(expected.bits_per_byte, abs=1e-6)
    assert (found.notes["tokens"], found.notes["bytes"]) == (expected.tokens, expected.bytes)


def test_the_held_out_part_of_packed_data(tmp_path: Path) -> None:
    data = prepare("stories", tmp_path / "packed", documents=20, tokenizer="bytes", workers=1)
    expected = score_text(
        TrainableBraid(scorer().model), validation_windows(TokenStream(data, Subset(0.9, 1.0)), CONTEXT)
    )
    model = EvaluatedModel(scorer(), TOKENIZER)
    found = read_text(data.folder, Settings(held_out=0.1)).evaluate("bits_per_byte", model)
    assert found.score == pytest.approx(expected.bits_per_byte, abs=1e-6)
    assert found.count == 2
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(BraidError, match="only packed data has a held-out part"):
        read_text(tmp_path / "a.txt", Settings(held_out=0.1))


def test_packed_data_of_another_tokenizer_is_read_as_text(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "sets/bpe", vocab_size=270, workers=1)
    prepare("stories", tmp_path / "sets/stories", documents=3, tokenizer="bytes", workers=1)
    model = EvaluatedModel(scorer(), TOKENIZER)
    text = read_text(folder).evaluate("bits_per_byte", model)
    assert read_text(tmp_path / "sets/bpe").evaluate("bits_per_byte", model).score == pytest.approx(
        text.score, abs=1e-6
    )
    both = read_text(tmp_path / "sets").evaluate("bits_per_byte", model)
    assert {name: part.count for name, part in both.parts.items()} == {"bpe": 3, "stories": 3}
    assert both.parts["bpe"].score == pytest.approx(text.score, abs=1e-6)


def test_the_window_is_that_of_the_training(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lineage.json").write_text(json.dumps({"recipe": {"data": {"length": 5}}}))

    def window(**settings: Any) -> int:
        model = EvaluatedModel(scorer(), TOKENIZER, tmp_path, Settings(**settings))
        return read_text(folder).evaluate("bits_per_byte", model).notes["window"]

    assert window() == 5
    assert window(window=9) == 9
    (tmp_path / "lineage.json").write_text(json.dumps({"recipe": {"data": {"length": 5000}}}))
    assert window() == CONTEXT
    (tmp_path / "lineage.json").write_text(json.dumps({"sources": [{"model": "m", "length": 5}, {"model": "n"}]}))
    assert window() == 5, "an edited model is read as the one that it was made of"
    with pytest.raises(BraidError, match="a window of 17 tokens is longer than the model's context of 16"):
        window(window=17)


@pytest.mark.parametrize(("kind", "positions"), [("stick_breaking", "none"), ("softmax", "rope")])
def test_positions_without_a_limit_read_more_than_the_context(kind: str, positions: str, folder: Path) -> None:
    """To see whether a model that was trained at one length works at another."""
    attention = {"kind": kind, "heads": 4}
    model = tiny_model(
        vocab_size=TOKENIZER.vocab_size, context=CONTEXT, positions=positions, block={"attention": attention}
    )
    evaluated = EvaluatedModel(Scorer(model), TOKENIZER, None, Settings(window=100))
    result = read_text(folder).evaluate("bits_per_byte", evaluated)
    stream = [TOKENIZER.eos_id]
    for text in ("One day.\nA cat sat.", "The end, ü.", "Nothing at all happened to anybody here."):
        stream += [*TOKENIZER.encode(text), TOKENIZER.eos_id]
    bits = -plain_sum(model, stream) / math.log(2)
    assert result.score == pytest.approx(bits / result.notes["bytes"], rel=1e-5)


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


ROWS = [{"q": "one?", "a": "two, ü"}, {"q": "and three?", "a": "four"}, {"q": "so?", "a": "no"}]


def answers_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_only_answers_are_scored_and_after_their_questions(tmp_path: Path) -> None:
    eos, template = TOKENIZER.eos_id, "{question} {answer}"
    assert eos is not None
    settings = Settings(field=("q",), answer="a", template=template)
    result = read_text(answers_file(tmp_path), settings).evaluate("bits_per_byte", EvaluatedModel(scorer(), TOKENIZER))
    bits, size, previous = 0.0, 0, []
    for row in ROWS:  # the context of 16 has room for one of the first two, and for the last after the second
        prompt, answer = f"{row['q']} ", f"{row['a']}"
        read, told = TOKENIZER.encode(prompt), [*TOKENIZER.encode(answer), eos]
        before = [eos, *previous, *read] if len(previous) + len(read) + len(told) <= CONTEXT else [eos, *read]
        model = scorer().model
        bits -= (plain_sum(model, [*before, *told]) - plain_sum(model, before)) / math.log(2)
        size += len(answer.encode())
        previous = [*before[1:], *told]
    assert result.score == pytest.approx(bits / size, abs=1e-5)
    assert result.notes["bytes"] == size
    assert result.notes["tokens"] == size + len(ROWS)


def test_packed_answers_are_scored_as_validation_does(tmp_path: Path) -> None:
    packed = prepare(answers_file(tmp_path), tmp_path / "packed", tokenizer="bytes", fields="q", answer="a")
    model = EvaluatedModel(scorer(), TOKENIZER)
    score = read_text(packed.folder).evaluate("bits_per_byte", model).score
    text = validation_windows(TokenStream(packed), CONTEXT)
    assert score == pytest.approx(score_text(TrainableBraid(model.model), text).bits_per_byte, abs=1e-5)
    settings = Settings(field=("q",), answer="a")
    direct = read_text(tmp_path / "rows.jsonl", settings).evaluate("bits_per_byte", model)
    assert direct.score == pytest.approx(score, abs=1e-6)
    other = prepare("stories", tmp_path / "stories", documents=50, tokenizer="bpe", vocab_size=300)
    words = load_tokenizer(other.tokenizer_folder)
    stranger = EvaluatedModel(Scorer(tiny_model(vocab_size=words.vocab_size, context=CONTEXT)), words)
    with pytest.raises(BraidError, match="another tokenizer"):
        read_text(packed.folder).evaluate("bits_per_byte", stranger)
