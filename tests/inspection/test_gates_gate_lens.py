"""Perplexity through the head after each gated layer, and what gates do, against slow references."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config

from braidlm.core.errors import BraidError
from braidlm.inspection import gates as gates_module
from braidlm.inspection.gates import GateActivity, LayerLens, ModelGates, gain_of, gate_lens, measure_gates, perplexity
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gating import attach, gates_of, without
from tests.tiny_models import randomised, tiny_model

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
DECODERS = {
    "gpt2": GPT2Config(vocab_size=37, n_embd=16, n_layer=4, n_head=4, n_positions=16),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
}
KINDS: dict[str, Any] = {
    "vector": "vector",
    "scalar": "scalar",
    "matrix": {"kind": "matrix", "bias": True},
    "low rank": {"kind": "matrix", "rank": 3},
}
MODELS = [*DECODERS, "braid", "braid with paths"]
TEXTS = [[1, 5, 9, 2, 7, 7, 3], [4], [8, 1, 30, 2, 6, 11, 12, 20, 21, 22, 23, 24, 25, 2, 1, 0, 9, 33, 2, 5], [3, 36]]


@torch.no_grad()
def gated(name: str, kind: Any = "vector", scale: float = 0.3) -> Any:
    """A model with random gates of this size."""
    if name.startswith("braid"):
        stages = ["block", {"parallel": {"layers": 2, "paths": 2, "join": "add"}}, "block"]
        more = {"stages": stages} if name == "braid with paths" else {"stages": [{"block": {"layers": 4}}]}
        model: Any = tiny_model(context=16, gates={"kind": kind}, **more)
    else:
        model = randomised(AutoModelForCausalLM.from_config(DECODERS[name])).eval()
        attach(model, decode(GatesConfig, {"kind": kind}))
    generator = torch.Generator().manual_seed(3)
    for gate in gates_of(model).values():
        for parameter in gate.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def windows() -> list[list[int]]:
    return [text[at : at + 16] for text in TEXTS for at in range(0, len(text), 16)]


@torch.no_grad()
def slow_loss(model: Any, layer: int, off: bool) -> float:
    """Text by text: the stream after a layer, with that gate switched off or on, through norm and head."""
    norms: Any = {"GPT2LMHeadModel": "transformer.ln_f", "GPTNeoXForCausalLM": "gpt_neox.final_layer_norm"}
    norm = model.get_submodule(norms.get(type(model).__name__, "model.norm"))
    losses = []
    for text in windows():
        seen = []
        handle = norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        with without(model, [layer] if off else []):
            states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        handle.remove()
        stream = seen[0] if layer == len(states) - 1 else states[layer]
        chances = model.get_output_embeddings()(norm(stream))[0].log_softmax(-1)
        losses += [-chances[at, token].item() for at, token in enumerate(text[1:])]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_a_gate_switched_off_and_on(name: str, kind: str) -> None:
    model = gated(name, KINDS[kind])
    lenses = gate_lens(model, TEXTS)
    assert [lens.layer for lens in lenses] == [2, 3, 4]
    for lens in lenses:
        assert lens.loss == pytest.approx(slow_loss(model, lens.layer, off=False), rel=1e-5)
        assert lens.loss_without == pytest.approx(slow_loss(model, lens.layer, off=True), rel=1e-5)
        assert lens.change == pytest.approx(math.log(lens.perplexity / lens.perplexity_without), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_after_the_last_layer_it_is_the_models_own_loss(name: str) -> None:
    model = gated(name)
    losses, count = 0.0, 0
    for text in windows():
        if len(text) > 1:
            ids = torch.tensor([text])
            with torch.no_grad():
                losses += model(ids, labels=ids).loss.item() * (len(text) - 1)
            count += len(text) - 1
    assert gate_lens(model, TEXTS)[-1].loss == pytest.approx(losses / count, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "braid"])
def test_batches_and_padding_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gated(name)
    together, activity = gate_lens(model, TEXTS), measure_gates(model, TEXTS, [None] * 4)
    monkeypatch.setattr(gates_module, "TOKENS_PER_PASS", 1)
    for one, other in zip(together, gate_lens(model, TEXTS), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
    for mine, alone in zip(activity, measure_gates(model, TEXTS, [None] * 4), strict=True):
        assert mine.relative == pytest.approx(alone.relative, rel=1e-6)
        assert mine.activation == pytest.approx(alone.activation, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "braid"])
def test_zero_gates_change_nothing_at_all(name: str) -> None:
    model = gated(name, scale=0.0)
    assert all(lens.change == 0.0 for lens in gate_lens(model, TEXTS))
    activity = measure_gates(model, TEXTS, [None] * 4)
    assert all(one.relative == one.gain == 0.0 and one.activation == one.activation_without for one in activity)
    assert ModelGates("m", "", "vector", 1, activity).findings == ["no gate has moved from zero: the model is its base"]


def test_a_stream_of_another_width_is_not_read() -> None:
    stages = [
        {"project": {"to": 8}},
        {"block": {"layers": 2, "attention": {"heads": 2}}},
        {"project": {"to": 16}},
        "block",
    ]
    model = tiny_model(stages=stages, gates={"kind": "scalar"})
    assert list(gates_of(model)) == [2, 3]
    assert [lens.layer for lens in gate_lens(model, TEXTS)] == [3]
    assert [one.layer for one in measure_gates(model, TEXTS, [None] * 4)] == [2, 3]


def test_nothing_to_predict_is_an_error() -> None:
    with pytest.raises(BraidError, match="no two tokens in a row"):
        gate_lens(gated("braid"), [[3], [4]])


def test_perplexity_of_any_loss() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf
    assert LayerLens(2, 1e4, 1e4 + 1).change == 1.0


@pytest.mark.parametrize("name", ["llama", "braid"])
@torch.no_grad()
def test_activities_are_those_of_the_streams(name: str) -> None:
    model = gated(name, "scalar")
    domains = ["a", None, "b", "a"]
    activity = {one.layer: one for one in measure_gates(model, TEXTS, domains)}
    scalar = abs(gates_of(model)[3].weight.item())
    assert activity[3].gain == pytest.approx(scalar, rel=1e-6)
    shares: dict[str | None, list[float]] = {}
    sizes, plain_sizes = [], []
    for text, domain in zip(TEXTS, domains, strict=True):
        for at in range(0, len(text), 16):
            ids = torch.tensor([text[at : at + 16]])
            states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
            with without(model, [3]):
                plain = model(ids, output_hidden_states=True, use_cache=False).hidden_states[3]
            sizes += states[3].abs().mean(-1)[0].tolist()
            plain_sizes += plain.abs().mean(-1)[0].tolist()
            shares.setdefault(domain, []).extend((scalar * states[2].norm(dim=-1) / plain.norm(dim=-1))[0].tolist())
    every = [share for own in shares.values() for share in own]
    assert activity[3].relative == pytest.approx(sum(every) / len(every), rel=1e-5)
    assert activity[3].activation == pytest.approx(sum(sizes) / len(sizes), rel=1e-5)
    assert activity[3].activation_without == pytest.approx(sum(plain_sizes) / len(plain_sizes), rel=1e-5)
    expected = {name: sum(own) / len(own) for name, own in shares.items() if name}
    assert activity[3].by_domain == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_gain_is_the_root_mean_square_of_singular_values(kind: str) -> None:
    gate: Any = gates_of(gated("llama", KINDS[kind]))[2]
    matrix = {"vector": lambda: gate.weight.diag(), "scalar": lambda: gate.weight * torch.eye(16)}.get(
        kind, lambda: gate.weight if gate.down is None else gate.weight @ gate.down
    )()
    expected = torch.linalg.svdvals(matrix).square().mean().sqrt().item()
    assert gain_of(gate, 16) == pytest.approx(expected, rel=1e-5)


def test_gates_that_are_still_zero_are_named() -> None:
    layers = [GateActivity(n, 1, 1, 0, 0, float(n == 4), float(n == 4)) for n in (2, 3, 4)]
    assert ModelGates("m", "", "vector", 1, layers).findings == ["the gates of layers 2, 3 are still zero"]


@torch.no_grad()
def test_small_gates_are_not_lost_in_half_precision() -> None:
    exact = measure_gates(gated("llama", scale=1e-4), TEXTS, [None] * 4)
    half = measure_gates(gated("llama", scale=1e-4).to(torch.bfloat16), TEXTS, [None] * 4)
    for one, other in zip(exact, half, strict=True):
        assert other.relative == pytest.approx(one.relative, rel=0.05)
        assert 0 < one.relative < 1e-3, "less than bfloat16 resolves of the stream itself"
