"""Pauses before answers: read by the model, never scored, and without them every score is as it was."""

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import PAUSE, SpecialTokens
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.options import LastWords, MultipleChoice, endings
from braidlm.evals.scoring.completions import complete, prompt_ids
from braidlm.evals.scoring.requests import Request, requests_for
from braidlm.evals.scoring.scorer import Scorer
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer(SpecialTokens(order=("<|endoftext|>", "<|pad|>", PAUSE)))
TEXTS = [("one", " two"), ("", "three"), ("four", " 5")]


def evaluated(pauses: int = 0) -> EvaluatedModel:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=128)
    return EvaluatedModel(Scorer(model), TOKENIZER, settings=Settings(pauses=pauses))


def test_pauses_stand_before_what_is_scored() -> None:
    plain, paused = requests_for(TOKENIZER, TEXTS), requests_for(TOKENIZER, TEXTS, pauses=2)
    assert requests_for(TOKENIZER, TEXTS, pauses=0) == plain
    assert paused[1] == plain[1], "a text without a context has no question"
    ids = TOKENIZER.encode("one two")
    assert paused[0] == Request([*ids[:3], 258, 258, *ids[3:]], 5)
    for one, other in zip(plain, paused, strict=True):
        assert list(one.ids[one.first :]) == list(other.ids[other.first :]), "the same tokens are scored"


def test_scores_are_those_after_the_pauses() -> None:
    model = evaluated()
    (request,) = requests_for(TOKENIZER, TEXTS[:1], pauses=2)
    with torch.no_grad():
        logs = model.model(torch.tensor([list(request.ids)])).logits[0].log_softmax(-1)
    expected = sum(float(logs[at - 1, request.ids[at]]) for at in range(5, len(request.ids)))
    np.testing.assert_allclose(model.scorer.score([request]).sums, [expected], rtol=1e-5)


def test_tasks_take_the_setting() -> None:
    choice = MultipleChoice([endings(f"question {i}:", ["yes", "no", "maybe"], 0, "a") for i in range(20)], "")
    words = LastWords([(f"a text {i} of", " words") for i in range(20)], "")
    for task in (choice, words):
        plain, paused = (task.evaluate("task", evaluated(pauses)) for pauses in (0, 4))
        again = task.evaluate("task", evaluated())
        assert (plain.score, plain.also, plain.items) == (again.score, again.also, again.items)
        assert plain.also != paused.also or plain.items != paused.items
    other = EvaluatedModel(evaluated().scorer, bytes_tokenizer(), settings=Settings(pauses=1))
    with pytest.raises(BraidError, match="not trained with pauses"):
        choice.evaluate("task", other)


def test_completions_begin_after_pauses_and_have_none() -> None:
    model = evaluated()
    with torch.no_grad():
        model.model.head.weight[258] *= 20
    prompts = [prompt_ids(TOKENIZER, "one", pauses) for pauses in (0, 3)]
    assert prompts[1] == [*prompts[0], 258, 258, 258]
    for completion in complete(model, prompts, 8, [lambda text: False] * 2):
        assert PAUSE not in completion.text
        assert len(completion.text.encode()) > 0
