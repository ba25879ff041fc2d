"""The scorer gives what the definition gives, whatever runs together, for Braid's models and for plain transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from braidlm.core.errors import BraidError
from braidlm.evals.scoring.forward import TREE_MODEL_TYPES, full_float32
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from tests.evals.plain_scorer import plain_sum, plain_tokens
from tests.tiny_models import VOCABULARY, random_ids, tiny_model

BRAID: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"positions": "learned", "tie_embeddings": True},
    "windows": {"block": {"attention": {"heads": 4, "kv_heads": 2, "window": 3}}},
    "routed": {"stages": [{"parallel": {"layers": 2, "paths": 4, "join": {"kind": "routed", "top_k": 2}}}]},
    "experts": {"stages": ["block", {"project": {"to": 16, "experts": 4}}]},
}


def pairs(count: int = 40, longest: int = 20) -> list[Request]:
    """Neighbours that begin alike, of many lengths."""
    found = []
    for seed in range(count):
        first = random_ids(1, 3 + seed % (longest - 3), seed=seed)[0].tolist()
        other = [*first[: len(first) // 2], *random_ids(1, 3 + seed % 5, seed=1000 + seed)[0].tolist()]
        found += [Request(first), Request(other)]
    return found


def transformers_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **sizes))
    elif kind == "llama":
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **sizes))
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(max_position_embeddings=32, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # far from uniform
    return model.eval()


@pytest.mark.parametrize("kind", BRAID)
def test_it_agrees_with_the_plain_scorer(kind: str) -> None:
    model, requests = tiny_model(**BRAID[kind]), pairs()
    scores = Scorer(model).score(requests)
    for request, tokens in zip(requests, np.split(scores.tokens, scores.bounds[1:-1]), strict=True):
        np.testing.assert_allclose(tokens, plain_tokens(model, list(request.ids)), rtol=0, atol=2e-5)
    sums = [plain_sum(model, list(request.ids)) for request in requests]
    np.testing.assert_allclose(scores.sums, sums, rtol=0, atol=1e-4)
    assert np.ptp(sums) > 10


@pytest.mark.parametrize("kind", [*TREE_MODEL_TYPES, "gpt_neox"])
def test_models_of_transformers(kind: str) -> None:
    model, requests = transformers_model(kind), pairs()
    scorer = Scorer(model)
    assert scorer.share is (kind in TREE_MODEL_TYPES)
    sums = [plain_sum(model, list(request.ids)) for request in requests]
    np.testing.assert_allclose(scorer.score(requests).sums, sums, rtol=0, atol=1e-3)
    assert np.ptp(sums) > 10


def test_an_eager_attention_of_transformers() -> None:
    model, requests = transformers_model("gpt2"), pairs(10)
    before = Scorer(model).score(requests).sums
    model.set_attn_implementation("eager")
    np.testing.assert_allclose(Scorer(model).score(requests).sums, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", BRAID)
def test_how_much_runs_at_once_changes_nothing(kind: str) -> None:
    """In float64, so that a difference would be a mistake and not rounding."""
    model, requests = tiny_model(torch.float64, **BRAID[kind]), pairs()
    found = [
        Scorer(model, tokens_per_pass=places, share=share, dtype=torch.float64).score(requests).tokens
        for places in (1, 100, 10_000)
        for share in (True, False)
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-10)


def test_in_float32_only_rounding_is_left() -> None:
    model, requests = tiny_model(), pairs()
    one, many = (Scorer(model, tokens_per_pass=places).score(requests).sums for places in (1, 10_000))
    assert np.abs(one - many).max() < 1e-4
    again = Scorer(model, tokens_per_pass=10_000).score(requests)
    assert np.array_equal(again.sums, many)


def test_equal_sequences_have_equal_scores() -> None:
    requests = [*pairs(), *pairs()]
    sums = Scorer(tiny_model()).score(requests).sums
    assert np.array_equal(sums[: len(sums) // 2], sums[len(sums) // 2 :])


def test_a_few_logits_at_a_time() -> None:
    model, requests = tiny_model(torch.float64), pairs()
    scorer = Scorer(model, dtype=torch.float64)
    whole = scorer.score(requests).tokens
    scorer.logits_per_pass = 3 * VOCABULARY
    np.testing.assert_allclose(scorer.score(requests).tokens, whole, rtol=0, atol=1e-12)


def test_only_the_continuation_is_scored() -> None:
    model, ids = tiny_model(), random_ids(1, 9)[0].tolist()
    requests = [Request(ids, 6), Request(ids, 9), Request([], 0), Request(ids[:1]), Request(ids, 1)]
    scores = Scorer(model).score(requests)
    assert np.diff(scores.bounds).tolist() == [3, 0, 0, 0, 8]
    np.testing.assert_allclose(scores.tokens[:3], plain_tokens(model, ids, 6), rtol=0, atol=2e-5)
    assert scores.sums[1:4].tolist() == [0.0, 0.0, 0.0]
    assert scores.sums[4] == pytest.approx(plain_sum(model, ids), abs=1e-4)


def test_a_context_too_long_loses_its_beginning() -> None:
    model = tiny_model(positions="learned")  # 32 positions
    ids = random_ids(1, 40)[0].tolist()
    scores = Scorer(model).score([Request(ids, 38)])
    np.testing.assert_allclose(scores.tokens, plain_tokens(model, ids[7:], 31), rtol=0, atol=2e-5)


def test_exact_scores_are_those_of_float64() -> None:
    model, requests = tiny_model(), pairs(5)
    exact = Scorer(model).score_float64(requests).sums
    twin = tiny_model(torch.float64)
    expected = [plain_sum(twin, list(request.ids)) for request in requests]
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-9)
    assert next(model.parameters()).dtype == torch.float32


def test_the_model_is_read_without_dropout() -> None:
    model, requests = tiny_model(dropout=0.5), pairs(5)
    expected = Scorer(model).score(requests).sums
    assert np.array_equal(Scorer(model.train()).score(requests).sums, expected)


def test_progress_ends_at_all() -> None:
    said: list[tuple[int, int]] = []
    scorer = Scorer(tiny_model(), tokens_per_pass=64)
    trees = scorer.build_trees(pairs())
    scorer.score_trees(trees, lambda done, total: said.append((done, total)))
    assert said[-1] == (trees.nodes, trees.nodes)
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert len(said) > 3


def test_products_are_full_and_the_setting_comes_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_that_are_no_numbers() -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(BraidError, match=r"scores are not numbers\nThe model's weights hold NaN or infinity"):
        Scorer(model).score(pairs(2))


def test_a_narrower_type_only_when_asked() -> None:
    model, requests = tiny_model(), pairs()
    full, narrow = Scorer(model).score(requests).sums, Scorer(model, dtype=torch.bfloat16).score(requests).sums
    assert 0 < np.abs(full - narrow).max() < 3
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BRAID)
def test_a_gpu_gives_what_the_cpu_gives(kind: str) -> None:
    model, requests = tiny_model(**BRAID[kind]), pairs()
    here = Scorer(model).score(requests).sums
    np.testing.assert_allclose(Scorer(model.to("cuda")).score(requests).sums, here, rtol=0, atol=1e-3)
