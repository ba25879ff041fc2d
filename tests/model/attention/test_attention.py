"""Attention against a plain loop over rows, heads and queries, forward and gradients, in float64."""

import cmath
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.attention.attention import SoftmaxAttention
from braidlm.model.attention.positions import RotaryPositions, position_kinds
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import decode
from braidlm.model.span import Span, make_masks, positions_from_mask
from tests.tiny_models import random_ids, randomised, tiny_model

WIDTH = 12


def slow_rotation(x: Tensor, position: int, theta: float, pairs: str) -> Tensor:
    """Rotary embedding of one head [dim] as multiplication of complex numbers."""
    dim = len(x)
    rotated = [0.0] * dim
    for i in range(dim // 2):
        a, b = (i, i + dim // 2) if pairs == "half" else (2 * i, 2 * i + 1)
        number = complex(x[a], x[b]) * cmath.exp(1j * position * theta ** (-2 * i / dim))
        rotated[a], rotated[b] = number.real, number.imag
    return torch.tensor(rotated, dtype=x.dtype)


def slow_attention(part: SoftmaxAttention, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q K^T) V written out; `mask` [batch, time], true for real tokens."""
    batch, time, _ = hidden.shape
    dim, group = part.head_dim, part.heads // part.kv_heads
    weight, bias = part.qkv.weight, part.qkv.bias
    rows = []
    for b in range(batch):
        qkv = hidden[b] @ weight.T + (0 if bias is None else bias)
        query, key, value = qkv.split([part.heads * dim, part.kv_heads * dim, part.kv_heads * dim], dim=-1)
        outputs = []
        for t in range(time):
            seen = [s for s in range(t + 1) if part.window is None or s > t - part.window]
            seen = [s for s in seen if mask is None or mask[b, s] or s == t]
            heads = []
            for h in range(part.heads):
                own, shared = slice(h * dim, (h + 1) * dim), slice(h // group * dim, (h // group + 1) * dim)
                scores = torch.stack([query[t, own] @ key[s, shared] for s in seen]) / math.sqrt(dim)
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum(weight * value[s, shared] for weight, s in zip(weights, seen, strict=True)))
            outputs.append(torch.cat(heads))
        rows.append(torch.stack(outputs))
    concatenated = torch.stack(rows)
    return concatenated if part.out is None else part.out(concatenated)


def attention(**options: Any) -> SoftmaxAttention:
    part = SoftmaxAttention(decode(SoftmaxAttention.Config, {"heads": 6, **options}), WIDTH)
    return randomised(part).double()


def fast(part: SoftmaxAttention, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    time = hidden.shape[1]
    masks = make_masks([part.window], time, 0, mask, hidden.device)
    span = Span(torch.arange(time)[None], masks, causal=True, rotations={part.head_dim: None})
    return part(hidden, span)[0]


SHAPES = {
    "multi-head": {},
    "grouped": {"kv_heads": 3},
    "multi-query": {"kv_heads": 1},
    "wide heads": {"head_dim": 5, "kv_heads": 2},
    "no output": {"out_projection": False, "kv_heads": 2},
    "biases": {"bias": True, "kv_heads": 3},
    "window 1": {"window": 1},
    "window 3": {"window": 3, "kv_heads": 2},
    "window beyond": {"window": 50},
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_attention_is_the_plain_loop(options: dict[str, Any], padding: str | None) -> None:
    part = attention(**options)
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = None
    if padding:
        real = [False] * 2 + [True] * 4 if padding == "left" else [True] * 3 + [False] * 3
        mask = torch.tensor([[True] * 6, real])
    weights = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    results = []
    for run in (fast, slow_attention):
        inputs = [hidden, *part.parameters()]
        output = run(part, hidden, mask)
        results.append([output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("theta", [10000.0, 37.0])
def test_rotation_is_multiplication_of_complex_numbers(pairs: str, theta: float) -> None:
    part = RotaryPositions(RotaryPositions.Config(theta=theta, pairs=pairs), WIDTH, 64)
    heads = torch.randn(2, 5, 3, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 7, 8, 500]])
    got = part.rotation(8, positions, heads.dtype)(heads)
    for b in range(2):
        for t in range(5):
            for n in range(3):
                expected = slow_rotation(heads[b, t, n].double(), int(positions[b, t]), theta, pairs)
                torch.testing.assert_close(got[b, t, n].double(), expected, rtol=0, atol=1e-4)


@given(st.sampled_from(["half", "interleaved"]), st.integers(0, 200), st.integers(0, 50))
def test_a_rotated_product_depends_on_the_distance_alone(pairs: str, start: int, distance: int) -> None:
    part = RotaryPositions(RotaryPositions.Config(pairs=pairs), WIDTH, 64)
    torch.manual_seed(start)
    query, key = torch.randn(2, 1, 1, 1, 8)

    def product(at: int) -> Tensor:
        turn = [part.rotation(8, torch.tensor([[p]]), query.dtype) for p in (at + distance, at)]
        return (turn[0](query) * turn[1](key)).sum()

    torch.testing.assert_close(product(start), product(0), rtol=0, atol=2e-4)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_a_model_rotates_queries_and_keys_and_not_values(pairs: str) -> None:
    part = attention(kv_heads=2, head_dim=4, heads=4)
    hidden = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    rope = position_kinds.build(Choice("rope", RotaryPositions.Config(theta=100.0, pairs=pairs)), WIDTH, 8)
    positions = torch.arange(5)[None]
    rotations = {4: rope.rotation(4, positions, torch.float64)}
    got, _ = part(hidden, Span(positions, {None: None}, causal=True, rotations=rotations))
    qkv = (hidden[0] @ part.qkv.weight.T).view(5, 8, 4).detach()
    rotated = qkv.clone()
    for t in range(5):
        for n in range(6):
            rotated[t, n] = slow_rotation(qkv[t, n], t, 100.0, pairs)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for t in range(5):
        for h in range(4):
            scores = torch.stack([rotated[t, h] @ rotated[s, 4 + h // 2] / 2 for s in range(t + 1)]).softmax(0)
            expected[t, 4 * h : 4 * h + 4] = scores @ qkv[: t + 1, 6 + h // 2]
    torch.testing.assert_close(
        got[0].detach(), part.out(expected).detach(), rtol=0, atol=1e-6
    )  # angles are computed in float32


@given(
    window=st.none() | st.integers(1, 9),
    past=st.integers(0, 5),
    time=st.integers(1, 6),
    padding=st.none() | st.lists(st.booleans(), min_size=11, max_size=11),
)
def test_masks_are_the_explicit_rule(window: int | None, past: int, time: int, padding: list[bool] | None) -> None:
    keys = past + time
    real = None if padding is None else torch.tensor(padding)[None, :keys]
    mask = make_masks([window], time, past, real, torch.device("cpu"))[window]
    for t in range(time):
        for s in range(keys):
            query = past + t
            allowed = s <= query and (window is None or s > query - window)
            allowed = allowed and (real is None or bool(real[0, s]) or s == query)
            if mask is not None:
                assert bool(mask[0, 0, t, s]) == allowed
            elif past == 0 and time > 1:  # is_causal is set
                assert allowed == (s <= t)
            else:
                assert allowed


def test_positions_count_real_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert positions_from_mask(mask, 5).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert positions_from_mask(mask, 2).tolist() == [[1, 2], [2, 2], [0, 0]]


def test_a_window_forgets_what_is_out_of_every_layers_reach() -> None:
    model = tiny_model(torch.float64, block={"attention": {"heads": 4, "window": 3}})
    ids = random_ids(1, 12)
    changed = ids.clone()
    changed[0, 0] += 1
    with torch.no_grad():
        difference = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert (difference[:5] > 0).all()  # two layers reach 2 x (3 - 1) tokens back
    assert (difference[5:] == 0).all()


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 50), (64, 5)])
def test_score_flops_are_counted_pair_by_pair(length: int, window: int | None) -> None:
    part = attention(window=window)
    pairs = sum(min(t + 1, window or t + 1) for t in range(length))
    assert part.score_flops(length) == round(2 * 2 * WIDTH * pairs / length)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 0}, "heads: expected a whole number from 1 to 1024, got 0"),
        ({"heads": 6, "kv_heads": 4}, "heads (6) must be a multiple of kv_heads (4)"),
        ({"heads": 6, "kv_heads": 0}, "kv_heads: expected a whole number from 1 to 1024, got 0"),
        ({"head_dim": 0}, "head_dim: expected a whole number from 1 to 100000, got 0"),
        ({"window": 0}, "window: expected a whole number from 1 to 100000000, got 0"),
        ({"heads": 5}, "width 12 does not divide into 5 heads; set head_dim"),
        ({"head_dim": 3, "out_projection": False}, "without out_projection heads * head_dim (18) must equal the width"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BraidError) as caught:
        attention(**options)
    assert text in str(caught.value)


def test_rotary_positions_refuse_odd_heads_when_the_model_is_built() -> None:
    with pytest.raises(BraidError, match="rotary positions need an even head size, got 3"):
        tiny_model(block={"attention": {"heads": 4, "head_dim": 3}})
    tiny_model(block={"attention": {"heads": 4, "head_dim": 3}}, positions="learned")


def test_learned_positions_refuse_more_tokens_than_they_have() -> None:
    model = tiny_model(positions="learned", context=8)
    assert model(random_ids(1, 8)).logits.shape == (1, 8, 37)
    with pytest.raises(BraidError, match="9 tokens are more than the model's 8 learned positions") as caught:
        model(random_ids(1, 9))
    assert "Shorten the text" in str(caught.value)
