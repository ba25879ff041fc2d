"""How the prediction of a text changes: probabilities, ranks, divergences and bits per byte by their definitions."""

import math

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.inspection.one_text import check_size, divergence, predict, text_change
from braidlm.model.paths.switches import use_paths
from tests.inspection.path_models import TOKENIZER, path_model
from tests.tiny_models import tiny_model

TEXT = "1 + 2 is 3"
IDS = TOKENIZER.encode(TEXT)


def test_a_text_with_and_without_a_path() -> None:
    model = path_model("add")
    before = predict(model, IDS)
    use_paths(model, ["maths"])
    after = predict(model, IDS)
    change = text_change(before, after, IDS, TOKENIZER)
    assert len(change.tokens) == len(IDS)
    assert change.tokens[0].before is None
    probabilities = model(torch.tensor([IDS])).logits[0].detach().softmax(-1)
    for at, token in enumerate(change.tokens[1:], 1):
        assert token.after == pytest.approx(float(probabilities[at - 1, IDS[at]]), rel=1e-4)
        assert token.rank_after == 1 + int((probabilities[at - 1] > probabilities[at - 1, IDS[at]]).sum())
        assert token.before != token.after
        assert token.divergence is not None
        assert 0 < token.divergence <= 1
    bits = -sum(math.log2(token.after or 0) for token in change.tokens[1:])
    assert change.bits_after == pytest.approx(bits / (len(TEXT) - 1), rel=1e-4)
    assert change.bits_after != change.bits_before


def test_nothing_changes_without_a_switch() -> None:
    model = path_model("add")
    change = text_change(predict(model, IDS), predict(model, IDS), IDS, TOKENIZER)
    assert [token.divergence for token in change.tokens[1:]] == pytest.approx([0.0] * (len(IDS) - 1), abs=1e-6)
    assert change.bits_before == change.bits_after


def test_two_models_of_one_tokenizer_may_have_unused_rows() -> None:
    one, other = (tiny_model(vocab_size=TOKENIZER.vocab_size + more) for more in (0, 6))
    change = text_change(predict(one, IDS), predict(other, IDS), IDS, TOKENIZER)
    assert all(0 <= (token.divergence or 0) <= 1 for token in change.tokens)
    assert change.bits_after is not None
    assert math.isfinite(change.bits_after)


def test_the_divergence_of_distributions_that_share_nothing_is_one_bit() -> None:
    one, other = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.0, 0.0, 1.0]]).log()
    assert divergence(one, other).tolist() == [1.0]
    assert divergence(one, one).tolist() == [0.0]


def test_a_text_of_one_token_predicts_nothing() -> None:
    model = tiny_model(vocab_size=TOKENIZER.vocab_size)
    change = text_change(predict(model, IDS[:1]), predict(model, IDS[:1]), IDS[:1], TOKENIZER)
    assert (len(change.tokens), change.bits_before, change.bits_after) == (1, None, None)


def test_a_text_whose_predictions_take_too_much_memory_is_refused() -> None:
    check_size(range(1000), 50_000)
    with pytest.raises(BraidError, match="at most 1,342 are compared"):
        check_size(range(2000), 50_000)
