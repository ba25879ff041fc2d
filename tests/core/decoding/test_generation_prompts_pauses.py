"""Pause tokens in generation: after the prompt, never in the text."""

from pathlib import Path

import pytest
import torch

import braidlm
from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import continue_text, encode_prompts, next_tokens
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.data.tokenizing.tokenizer import PAUSE, SpecialTokens
from tests.tiny_models import tiny_model

TOKENIZER = bytes_tokenizer(SpecialTokens(order=("<|endoftext|>", "<|pad|>", PAUSE)))
GREEDY = Sampling(temperature=0)


def written(pauses: int, sampling: Sampling = GREEDY) -> str:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size)
    pieces = continue_text(model, TOKENIZER, ["Hello"], 12, sampling, pauses=pauses)
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("sampling", [Sampling(0.0, never=(1, 3)), Sampling(1.0, never=(1, 3), seed=1)], ids=str)
def test_what_is_never_chosen(sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0]]).expand(500, 4)
    assert set(sampling.choose(logits, sampling.generator(logits.device)).tolist()) <= {0, 2}
    probabilities = sampling.probabilities(logits)
    assert (probabilities[:, [1, 3]] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(500))


def test_pauses_follow_the_prompt() -> None:
    ids = TOKENIZER.encode("Hello")
    assert encode_prompts(TOKENIZER, ["Hello"], 2) == [[*ids, 258, 258]]
    model = tiny_model(vocab_size=TOKENIZER.vocab_size)
    with torch.no_grad():
        expected = model(torch.tensor([[*ids, 258, 258]])).logits[0, -1].softmax(-1).max()
    (best,) = next_tokens(model, TOKENIZER, ["Hello"], 1, pauses=2)[0]
    assert best.probability == pytest.approx(float(expected), rel=1e-4)
    assert next_tokens(model, TOKENIZER, ["Hello"], 1)[0] != [best]


def test_a_pause_is_not_a_part_of_the_text(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[258] *= 20  # it would be chosen all the time
    folder = save_model(model, tmp_path / "model", TOKENIZER, {})
    for pauses in (0, 3):
        text = braidlm.generate(folder, "Hello", max_tokens=12, greedy=True, pauses=pauses).texts[0]
        assert text.tokens == 12
        assert PAUSE not in text.text
    assert written(0) != written(3), "a model may use the time"


def test_a_model_without_pauses(tmp_path: Path) -> None:
    folder = save_model(tiny_model(vocab_size=258), tmp_path / "model", bytes_tokenizer(), {})
    assert braidlm.generate(folder, "Hello", max_tokens=2, pauses=0).texts[0].tokens == 2
    with pytest.raises(BraidError, match="was not trained with pauses"):
        braidlm.generate(folder, "Hello", pauses=1)
    with pytest.raises(BraidError, match="pauses"):
        braidlm.generate(folder, "Hello", pauses=-1)
