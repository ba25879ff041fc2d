"""LAMBADA's way: a word is right when greedy decoding writes it; perplexity is that of words."""

import math

import numpy as np
import pytest
import torch

from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import LastWords
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.plain_scorer import plain_sum
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer()


def evaluated() -> EvaluatedModel:
    return EvaluatedModel(Scorer(tiny_model(vocab_size=TOKENIZER.vocab_size, context=32)), TOKENIZER)


@torch.no_grad()
def written(model: EvaluatedModel, text: str, count: int) -> bytes:
    ids = list(text.encode())
    for _ in range(count):
        ids.append(int(model.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(token if token < 256 else 63 for token in ids[-count:])


def test_it_agrees_with_greedy_decoding_and_the_plain_sum() -> None:
    model = evaluated()
    passages = [(f"A cat {number}", word) for number in range(20) for word in (" sat", " ran off", "!")]
    # Whatever single letters the model itself writes next are right.
    for number in range(30):
        text = f"The {number * 7} dogs"
        letter = written(model, text, 1).decode("latin-1")
        if letter.isascii() and letter.isprintable() and letter != " ":
            passages.append((text, letter))
    right = [written(model, context, len(word)) == word.encode() for context, word in passages]
    assert 0 < sum(right) < len(right)
    result = LastWords(passages, "hash").evaluate("lambada", model)
    assert result.items["right"] == right
    assert result.score == pytest.approx(100 * np.mean(right))
    sums = [plain_sum(model.model, list((context + word).encode()), len(context)) for context, word in passages]
    assert result.also == {"perplexity of the word": pytest.approx(math.exp(-np.mean(sums)), rel=1e-5)}
    assert (result.chance, result.notes) == (None, {"shortened": 0, "in windows": 0})


def test_a_long_passage_loses_its_beginning() -> None:
    model = evaluated()
    result = LastWords([("x" * 50 + " and", " then"), ("and", " then")], "hash").evaluate("lambada", model)
    whole = list(("x" * 50 + " and then").encode())[-33:]
    sums = [plain_sum(model.model, whole, 28), plain_sum(model.model, list(b"and then"), 3)]
    assert result.also["perplexity of the word"] == pytest.approx(math.exp(-np.mean(sums)), rel=1e-5)
    assert result.notes == {"shortened": 1, "in windows": 0}
