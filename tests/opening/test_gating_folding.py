"""Folding: zero gates go without changing a bit, the others stay, and the reasons that are given are true."""

from typing import Any

import pytest
import torch
from torch import nn

from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig, make_gate
from braidlm.opening.gating import attach, find_parts, fold, folding_refusals, gates_of, is_zero
from tests.opening.random_decoders import open_gates, tiny_decoder, token_ids

KINDS: list[Any] = ["vector", "scalar", "matrix", {"kind": "matrix", "rank": 3}, {"kind": "matrix", "bias": True}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zero_gates_go_and_the_others_stay(kind: Any) -> None:
    model, ids = tiny_decoder("llama"), token_ids(2, 7)
    attach(model, decode(GatesConfig, {"kind": kind}))
    open_gates({3: gates_of(model)[3]})
    before = model(ids).logits
    refused = fold(model)
    assert list(refused) == list(gates_of(model)) == [3]
    assert torch.equal(model(ids).logits, before)
    assert folding_refusals(model) == refused


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gate_is_zero_if_it_adds_nothing(kind: Any) -> None:
    gate: Any = make_gate(decode(GatesConfig, {"kind": kind}).kind, 8)
    hidden = torch.randn(2, 3, 8)
    assert is_zero(gate)
    assert not gate(hidden).any()
    for name, parameter in gate.named_parameters():
        if name != "down":
            with torch.no_grad():
                parameter[0] = 1.0
            assert not is_zero(gate)
            assert gate(hidden).any()
            with torch.no_grad():
                parameter[0] = 0.0


def divided(model: Any, factor: float, first: int, norms_too: bool) -> None:
    """Divide the stream from layer `first` on by a factor, in the weights that write it."""
    parts = find_parts(model)
    for index, layer in enumerate(parts.layers[first - 1 :]):
        for writer in (layer.attention.dense, layer.mlp.dense_4h_to_h):
            writer.weight /= factor
            writer.bias /= factor
        for norm in (layer.input_layernorm, layer.post_attention_layernorm) if norms_too and index else ():
            norm.eps /= factor**2
    if norms_too:
        parts.norm.eps /= factor**2


@torch.no_grad()
@pytest.mark.parametrize("parallel", [True, False])
def test_where_a_scalar_gate_could_be_folded_and_where_not(parallel: bool) -> None:
    """In GPT-NeoX, with an epsilon of its own for every norm; not with one for all, nor in layers of two sublayers."""

    def made() -> Any:
        model = tiny_decoder("gpt-neox", dtype=torch.float64, use_parallel_residual=parallel, layer_norm_eps=0.1)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    ids, factor = token_ids(2, 7), 1.5
    gated = made()
    attach(gated, decode(GatesConfig, {"kind": "scalar", "layers": [2]}))
    gates_of(gated)[2].double().get_parameter("weight").fill_(factor - 1)
    expected = gated(ids).logits
    changes = []
    for norms_too in (True, False):
        model = made()
        divided(model, factor, 2, norms_too)
        changes.append((model(ids).logits - expected).abs().max().item())
    assert (changes[0] < 1e-12) == parallel
    assert changes[1] > 1e-4
    assert list(folding_refusals(gated)) == [2]
