"""Texts as tokens, cut as transformers cuts them, and the batches that they make."""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.classifier import encode
from braidlm.evals.finetuning.loop import (
    FULL,
    LORA,
    evaluation_batches,
    hyperparameters_for,
    padded_width,
    training_batches,
)
from tests.evals.labelled_examples import TOKENIZER

CPU = torch.device("cpu")
TEXTS = ["", "a", "abcdefg", "abcdefgh", "abcdefghijklmnop", "x" * 40]


def framed() -> BraidTokenizer:
    """A tokenizer that puts tokens of its own before, between and behind."""
    backend = bytes_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    ids = {token: backend.token_to_id(token) for token in ("<s>", "</s>")}
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=list(ids.items())
    )
    return BraidTokenizer(backend, SpecialTokens(eos="</s>", bos="<s>"))


@pytest.mark.parametrize("make", [bytes_tokenizer, framed])
@pytest.mark.parametrize("max_length", [9, 16, 31])
@pytest.mark.parametrize("pairs", [True, False])
def test_tokens_are_those_of_transformers(make: type, max_length: int, pairs: bool) -> None:
    tokenizer = make()
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    texts = [(a, b if pairs else None) for a in TEXTS for b in (TEXTS if pairs else [""]) if a or (pairs and b)]
    found = encode(tokenizer, texts, max_length, CPU)
    for index, (first, second) in enumerate(texts):
        together = [first if second is None else (first, second)]
        expected = plain(together, truncation=True, max_length=max_length)["input_ids"][0]
        assert found.ids[index, : found.lengths[index]].tolist() == expected, (first, second)
        assert found.last_positions[index] == len(expected) - 1


def test_encoding_leaves_the_tokenizer_alone() -> None:
    before = TOKENIZER.backend.to_str()
    encode(TOKENIZER, [("abc", "def")], 4, CPU)
    assert TOKENIZER.backend.to_str() == before


def test_a_text_without_tokens_still_has_a_last_one() -> None:
    found = encode(TOKENIZER, [("", None), ("ab", None)], 8, CPU)
    assert found.lengths.tolist() == [1, 2]


def test_an_epoch_has_full_batches_of_texts_that_are_alike() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 1003)
    found = training_batches(lengths, 16, np.random.default_rng(1))
    assert len(found) == 62
    assert {len(batch) for batch in found} == {16}
    seen = np.concatenate(found)
    assert len(set(seen.tolist())) == 992  # each at most once
    filled = sum(16 * lengths[batch].max() for batch in found) / lengths[seen].sum()
    assert filled < 1.2  # by chance it would be about 1.9
    again = training_batches(lengths, 16, np.random.default_rng(2))
    assert any((a != b).any() for a, b in zip(found, again, strict=True))


def test_a_small_set_is_one_batch() -> None:
    assert [sorted(batch) for batch in training_batches(np.ones(3, int), 16, np.random.default_rng(0))] == [[0, 1, 2]]


def test_every_text_is_read_once_within_the_places() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    found = list(evaluation_batches(lengths, max_tokens=512, multiple=8, max_length=100))
    assert sorted(np.concatenate(found).tolist()) == list(range(500))
    assert all(len(batch) * padded_width(lengths[batch].max(), 8, 100) <= 512 for batch in found)
    assert len(found) < 80
    assert [padded_width(length, 8, 100) for length in (1, 8, 9, 97, 100)] == [8, 8, 16, 100, 100]


def test_the_schedules_are_the_papers() -> None:
    # BabyLM 2025: cosine with 6% of warm-up, down to a tenth.
    assert FULL.rate(0, 100) == 0.0
    assert FULL.rate(3, 100) == pytest.approx(1.5e-5)
    assert FULL.rate(6, 100) == pytest.approx(3e-5)
    assert FULL.rate(53, 100) == pytest.approx(3e-5 * 0.55)
    assert FULL.rate(100, 100) == pytest.approx(3e-6)
    # PaPaformer: a straight line to nothing.
    assert [LORA.rate(step, 10) for step in (0, 5, 10)] == pytest.approx([1e-3, 5e-4, 0.0])


def test_what_a_user_gives_takes_the_papers_place() -> None:
    assert hyperparameters_for("boolq", Settings()).batch_size == 16
    assert hyperparameters_for("wsc", Settings()).epochs == 30
    assert hyperparameters_for("rte", Settings()) == FULL
    assert hyperparameters_for("wsc", Settings(finetune="lora")) == LORA
    given = Settings(finetune_epochs=2, finetune_learning_rate=0.1, finetune_patience=3, finetune_length=64)
    found = hyperparameters_for("boolq", given)
    assert (found.epochs, found.learning_rate, found.patience, found.length, found.batch_size) == (2, 0.1, 3, 64, 16)
