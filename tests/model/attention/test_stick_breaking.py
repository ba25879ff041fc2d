"""Stick-breaking attention: the public code's numbers, its options, chunks, and every kind of projection."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from braidlm.model.attention import stick_breaking
from braidlm.model.attention.stick_breaking import StickBreaking, stick_breaking_weights
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.reference import REFERENCE


def heads(time: int, keys: int | None = None, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values [2, head, time, 8]."""
    torch.manual_seed(0)
    query = torch.randn(2, count, time, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, keys or time, 8, dtype=torch.float64)
    return query, key, value


def as_printed(score: Tensor) -> Tensor:
    """Equation 4, one product for each weight."""
    share = torch.sigmoid(score)
    weights = torch.zeros_like(score)
    for t in range(score.shape[0]):
        for i in range(t + 1):
            weights[t, i] = share[t, i] * torch.prod(1 - share[t, i + 1 : t + 1])
    return weights


def test_the_public_code_agrees() -> None:
    tensors = load_file(REFERENCE / "stick-breaking.safetensors")
    query, key, value = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    output, weights = StickBreaking(True, "dropped").attend_and_show(query, key, value, None, True, 0.0)
    torch.testing.assert_close(weights, tensors["attention"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output.transpose(1, 2), tensors["out"], atol=1e-5, rtol=1e-5)


def test_weights_are_the_printed_products() -> None:
    score = torch.randn(9, 9, dtype=torch.float64)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    weights, left = stick_breaking_weights(score[None, None], visible)
    torch.testing.assert_close(weights[0, 0], as_printed(score))
    torch.testing.assert_close(weights.sum(-1) + left, torch.ones(1, 1, 9, dtype=torch.float64))


def test_extreme_scores_stay_finite() -> None:
    for value in (-1e4, 1e4):
        score = torch.full((1, 1, 5, 5), value, requires_grad=True)
        weights, left = stick_breaking_weights(score, torch.ones(5, 5, dtype=torch.bool).tril())
        (weights.sum() + left.sum()).backward()
        assert weights.isfinite().all()
        assert score.grad is not None
        assert score.grad.isfinite().all()


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("rest", ["dropped", "current"])
def test_what_a_token_sees_of_itself(current: bool, rest: Any) -> None:
    query, key, value = heads(6)
    _, weights = StickBreaking(current, rest).attend_and_show(query, key, value, None, True, 0.0)
    own = weights.diagonal(dim1=-2, dim2=-1)
    assert bool((own > 0).all()) == (current or rest == "current")
    if rest == "current":
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(own))
    elif not current:
        assert not weights[:, :, 0].any()  # the first token sees nothing


@pytest.mark.parametrize(("time", "keys"), [(11, 11), (11, 19), (1, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_of_queries_change_nothing(time: int, keys: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stick_breaking, "QUERIES_AT_ONCE", 4)
    seen, own = torch.ones(time, keys).tril(keys - time).bool(), torch.eye(keys).bool()[-time:]
    mask = (torch.rand(2, 1, time, keys) > 0.3) & seen | own if masked else None
    rule, gradients, outputs = StickBreaking(True, "current"), [], []
    for attend in (rule.attend, lambda *inputs: rule.attend_and_show(*inputs)[0]):
        inputs = [x.requires_grad_() for x in heads(time, keys, count=4)]
        outputs.append(attend(*inputs, mask, True, 0.0))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), inputs))
    torch.testing.assert_close(outputs[0], outputs[1])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


KEYS = [None, "own", "shared", "stream"]


def model(kind: str, keys: str | None, kv_heads: int | None = None, positions: str = "none") -> BraidForCausalLM:
    attention: dict[str, Any] = {"kind": kind, "heads": 4, "kv_heads": kv_heads}
    if keys is not None:
        attention["experts"] = {"names": 4, "keys": keys, "router": {"top_k": 2, "compute": "sparse"}}
    block = {"attention": attention, "feed": {"kind": "mlp", "hidden": 16}}
    architecture = {"width": 32, "context": 256, "positions": positions, "block": block, "stages": [{"block": {}}] * 2}
    torch.manual_seed(0)
    return BraidForCausalLM(BraidConfig(architecture=architecture, vocab_size=50)).eval()


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", ["softmax", "stick_breaking"])
def test_every_projection_works_with_every_rule(kind: str, keys: str | None) -> None:
    """Cache, padding on the left, and computing only the chosen experts or all: none of them changes a logit."""
    made = model(kind, keys, None if keys == "stream" else 2, "rope")
    ids = torch.randint(0, 50, (2, 20))
    with torch.no_grad():
        whole = made(ids).logits
        first = made(ids[:, :12], use_cache=True)
        then = made(ids[:, 12:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(torch.cat((first.logits, then), 1), whole, atol=1e-5, rtol=1e-5)
        padding = torch.ones(2, 20, dtype=torch.long)
        padding[0, :7] = 0
        padded = made(ids, attention_mask=padding).logits[0, 7:]
        torch.testing.assert_close(padded, made(ids[:1, 7:]).logits[0], atol=1e-5, rtol=1e-5)
        for module in made.modules():
            if hasattr(module, "compute"):
                module.compute = "dense"
        torch.testing.assert_close(made(ids).logits, whole, atol=1e-5, rtol=1e-5)


def test_a_token_costs_as_much_as_its_chosen_experts() -> None:
    from braidlm.core.models.accounting import model_cost

    few, all_of_them = model("stick_breaking", "shared"), model("stick_breaking", "shared")
    for part in all_of_them.modules():
        if hasattr(part, "query_share"):
            part.query_share = 1.0
    assert model_cost(few, 64).flops_per_token < model_cost(all_of_them, 64).flops_per_token
    assert few.model.stages[0].layers[0].attention.cache_shape == (4, 8)


def test_no_positions_work_far_beyond_the_trained_length() -> None:
    """The tokens at the end see the same neighbours at any length, since old keys have lost their weight."""
    made = model("stick_breaking", None)
    ids = torch.randint(0, 50, (1, 1200))
    with torch.no_grad():
        long, short = made(ids).logits[0, -1], made(ids[:, -600:]).logits[0, -1]
    torch.testing.assert_close(long, short, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": {"names": 4, "keys": "stream"}, "head_dim": 4}, "needs kv_heads \\* head_dim \\(16\\) equal"),
        ({"experts": {"names": 4, "keys": "shared", "scope": "routed"}}, "scope 'routed' needs keys 'own'"),
        ({"experts": {"names": 4, "keys": "shared"}, "out_projection": False}, "out_projection must be true"),
        ({"experts": {"names": 4, "kv_bias": True}}, "kv_bias is for a shared projection"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    block = {"attention": {"kind": "stick_breaking", "heads": 4, **options}}
    architecture = {"width": 32, "block": block, "stages": ["block"]}
    with pytest.raises(BraidError, match=message):
        BraidForCausalLM(BraidConfig(architecture=architecture, vocab_size=50))
