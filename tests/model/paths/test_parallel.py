"""The parallel stage: stacked paths equal a module per path, and unequal paths equal their blocks run one by one."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache

from braidlm.core.decoding.decoder import Decoder
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.model.attention.attention import SoftmaxAttention, attentions
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import blocks_in_layer
from braidlm.model.routing.stacked import StackedLinear
from tests.model.parallel_layers import attention_experts, both_forms, experts, first_layer, path_model, unstacked
from tests.tiny_models import random_ids, tiny_config, tiny_model

EQUAL = {"rtol": 0.0, "atol": 1e-10}

STACKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"layers": 2},
    "layer norm": {"norm": "layer"},
    "layer norm without bias": {"norm": {"kind": "layer", "bias": False}},
    "mlp with biases": {"feed": {"kind": "mlp", "hidden": 20, "bias": True}, "attention": {"bias": True}},
    "gelu_new": {"feed": {"kind": "mlp", "hidden": 20, "activation": "gelu_new"}},
    "relu": {"feed": {"kind": "mlp", "hidden": 20, "activation": "relu"}},
    "swiglu with biases": {"feed": {"bias": True}},
    "learned beta": {"feed": {"learned_beta": True}},
    "geglu": {"feed": {"kind": "geglu", "hidden": 20, "bias": True}},
    "grouped-query": {"attention": {"kv_heads": 2}},
    "multi-query in a window": {"attention": {"kv_heads": 1, "window": 3}},
    "window": {"attention": {"window": 2}},
    "no output projection": {"attention": {"out_projection": False}},
    "heads of another size": {"attention": {"head_dim": 6}},
    "narrow paths": {"width": 8, "layers": 2},
    "narrow paths, gumbel": {"width": 8, "layers": 2, "join": {"kind": "gumbel_v2", "losses": {"load_balance": 0.1}}},
    "wide paths, add": {"width": 24, "join": "add"},
    "concat": {"layers": 2, "join": "concat", "attention": {"heads": 2}},
    "deeper than layers": {"depth": 3, "layers": 2},
    "shallower than layers": {"depth": 1, "layers": 2},
    "normed and residual": {"join": {"kind": "shared_linear", "norm": "layer", "residual": True}},
    "gumbel": {"layers": 2, "join": {"kind": "gumbel_v1", "losses": {"token_entropy": 0.1}}},
    "grows": {"layers": 2, "to": 24},
    "experts": {"layers": 2, **experts(3, shared=8)},
    "experts, sparse": {"layers": 2, **experts(5, compute="sparse", renormalise=False, bias=False, top_k=3)},
    "experts, concat": {"layers": 2, "depth": 4, "join": "concat", "attention": {"heads": 2}, **experts(3, shared=12)},
    "experts, gumbel, narrow": {"width": 8, "join": "gumbel_v1", **experts(4, compute="sparse")},
    "experts, router of two layers": experts(3, norm="rms", hidden=6, silent=2),
    "experts, silent": experts(3, silent=2, renormalise=False),
    "experts, balanced without a loss": experts(3, balance_rate=0.01, compute="sparse"),
    "experts, mlp with biases": experts(3, shared=8, feed={"kind": "mlp", "bias": True}),
    "attention experts": {"layers": 2, "stacked": "with_experts", **attention_experts()},
    "attention experts, sparse": {**experts(3, compute="sparse"), **attention_experts(compute="sparse")},
    "mixture of heads": {**experts(3, shared=4), **attention_experts("shared", compute="sparse")},
    "experts, learned beta": experts(3, feed={"learned_beta": True}, compute="sparse"),
}
"""Options of a parallel stage of equal paths; width and depth are each path's own."""


def gradients(model: BraidForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **EQUAL)


def trained_alike(stacked: BraidForCausalLM, plain: BraidForCausalLM, mask: Tensor | None) -> None:
    """Logits, loss and every gradient, in training."""
    ids = random_ids(3, 7)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    outputs = []
    for model in (stacked, plain):
        torch.manual_seed(1)  # noise of routers
        output = model.train()(ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        outputs.append(output)
    close(outputs[0].logits, outputs[1].logits)
    close(outputs[0].loss, outputs[1].loss)
    names = list(stacked.model.stages[0].layers[0].names)
    actual, expected = unstacked(gradients(stacked), names), gradients(plain)
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        close(actual[name], gradient)


MASKS = {
    "unpadded": None,
    "left": torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] * 6 + [1]]),
    "both": torch.tensor([[0] * 2 + [1] * 5, [1] * 4 + [0] * 3, [0] * 6 + [1]]),
}


@pytest.mark.parametrize(("count", "mask"), [(4, "unpadded"), (2, "both")])
@pytest.mark.parametrize("options", STACKS)
def test_a_stack_is_its_paths(options: str, count: int, mask: str) -> None:
    trained_alike(*both_forms(STACKS[options], count), MASKS[mask])


@pytest.mark.parametrize("options", STACKS)
def test_a_stack_is_its_paths_with_a_cache(options: str) -> None:
    stacked, plain = both_forms(STACKS[options], 4)
    ids, mask = random_ids(3, 7), MASKS["left"]
    expected, cache, done = plain(ids, attention_mask=mask, use_cache=False).logits, DynamicCache(), 0
    for piece in ids.split([3, 1, 2, 1], dim=1):
        done += piece.shape[1]
        got = stacked(piece, attention_mask=mask[:, :done], past_key_values=cache).logits
        real = mask[:, done - piece.shape[1] : done].bool()
        close(got[real], expected[:, done - piece.shape[1] : done][real])
    decoder = Decoder(stacked, 1, 8)
    close(decoder.prefill(ids[:1, :4]), expected[:1, 3])
    close(decoder.step(ids[:1, 4]), expected[:1, 4])


@pytest.mark.parametrize("positions", ["none", "learned", {"kind": "rope", "pairs": "interleaved"}], ids=str)
def test_a_stack_is_its_paths_with_any_positions(positions: Any) -> None:
    trained_alike(*both_forms({"layers": 2}, 3, positions=positions), MASKS["left"])


def test_a_stack_is_its_paths_when_checkpointing() -> None:
    stacked, plain = both_forms(STACKS["gumbel"], 2)
    stacked.gradient_checkpointing_enable()
    trained_alike(stacked, plain, MASKS["left"])


@pytest.mark.slow
def test_a_stack_is_its_paths_when_compiled() -> None:
    stacked, plain = both_forms({"norm": "layer", "attention": {"kv_heads": 2}}, 2)
    stage, hidden = stacked.model.stages[0], torch.randn(2, 6, 16, dtype=torch.float64)
    compiled = torch.compile(stage, fullgraph=True, dynamic=False, backend="aot_eager")
    span = stacked.model.span(hidden)
    actual, expected = compiled(hidden, span)[0], plain.model.stages[0](hidden, span)[0]
    close(actual, expected)
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream)
    ours = unstacked({n: p.grad for n, p in stage.named_parameters()}, ["path_1", "path_2"])
    for name, parameter in plain.model.stages[0].named_parameters():
        close(ours[name], parameter.grad)


def test_a_stack_costs_what_its_paths_do() -> None:
    for options in STACKS.values():
        stacked, plain = both_forms(options, 2)
        assert model_cost(stacked, 16) == model_cost(plain, 16)


def test_dropout_falls_on_every_path_of_a_stack_by_itself() -> None:
    layer, hidden, span, _ = first_layer(dropout={"residual": 0.5})
    for parameter in layer.parameters():  # all paths alike, so that only dropout can make them differ
        parameter.data = parameter.data[:1].expand_as(parameter) if parameter.ndim > 1 else parameter.data
    outputs, _ = layer.eval().outputs(hidden, span)
    close(outputs[0], outputs[1])
    outputs, _ = layer.train().outputs(hidden, span)
    assert not torch.allclose(outputs[0], outputs[1])


def test_a_stack_begins_as_its_paths_would() -> None:
    wide = {"width": 128, "block": {"attention": {"heads": 4}}}
    for kind in ("normal", "gpt2", "small", "fan_in", "torch"):
        stages = [{"parallel": {"paths": 4, "stacked": on, "norm": "layer"}} for on in (True, False)]
        stacked, plain = (
            dict(
                BraidForCausalLM(
                    tiny_config(stages=[stage], initialisation=kind, **copy.deepcopy(wide))
                ).named_parameters()
            )
            for stage in stages
        )
        parameters = unstacked(stacked, [f"path_{n}" for n in range(1, 5)])
        assert set(parameters) == set(plain)
        for name, parameter in plain.items():
            std = parameter.std().item()
            assert parameters[name].std().item() == pytest.approx(std, rel=0.1), (kind, name)
            assert parameters[name].mean().item() == pytest.approx(parameter.mean().item(), abs=0.1 * std), (kind, name)


def test_a_stack_under_autocast_stays_close_to_its_paths() -> None:
    stacked, plain = both_forms({"layers": 2}, 2)
    ids = random_ids(2, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = stacked.float()(ids, use_cache=False).logits
    expected = plain(ids).logits
    assert actual.dtype == torch.bfloat16
    assert nn.functional.cosine_similarity(actual.double().flatten(), expected.flatten(), dim=0) > 0.99


def test_members_may_read_one_stream_or_their_own() -> None:
    linear = StackedLinear(3, 4, 5, bias=True).double()
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    own, shared = torch.randn(3, 2, 6, 4).double(), torch.randn(1, 2, 6, 4).double()
    for stream in (own, shared):
        outputs = linear(stream)
        assert outputs.shape == (3, 2, 6, 5)
        for member in range(3):
            read = stream[member if len(stream) > 1 else 0]
            close(outputs[member], read @ linear.weight[member] + linear.bias[member])


UNEQUAL: dict[str, dict[str, Any]] = {
    "widths": {"a": {"width": 8}, "b": {"width": 24}},
    "one at the stream's width": {"a": {"width": 8}, "b": {}},
    "depths": {"a": {"depth": 3}, "b": {"depth": 1}},
    "heads": {"a": {"attention": {"heads": 2}}, "b": {}},
    "windows": {"a": {"attention": {"window": 2}}, "b": {}},
    "feeds": {"a": {"feed": {"kind": "mlp", "hidden": 20}}, "b": {"feed": {"learned_beta": True}}},
    "norms": {"a": {"norm": "layer"}, "b": {}},
    "everything": {
        "a": {"width": 8, "depth": 3, "norm": "layer", "attention": {"heads": 2, "kv_heads": 1, "window": 3}},
        "b": {"width": 24, "depth": 1, "feed": {"kind": "geglu", "hidden": 20}},
        "c": {},
    },
}


@pytest.mark.parametrize("join", ["shared_linear", "add", "gumbel_v1", "gumbel_v2"])
@pytest.mark.parametrize("paths", UNEQUAL)
def test_unequal_paths_run_one_by_one(paths: str, join: str) -> None:
    model = path_model(paths=UNEQUAL[paths], layers=2, join=join)
    hidden = model.model.embedding(random_ids(2, 6)).detach()
    span = model.model.span(hidden)
    stream = hidden
    for index, layer in enumerate(model.model.stages[0].layers):
        assert layer.stack is None
        outputs = []
        for name, options in UNEQUAL[paths].items():
            width, depth = options.get("width", 16), options.get("depth", 2)
            output = stream if width == 16 else stream @ layer.enter[name].weight.T
            blocks = list(layer.paths[name])
            assert len(blocks) == len(blocks_in_layer(depth, 2, index))
            for block in blocks:
                output, _ = block(output, span)
            assert output.shape[-1] == width
            outputs.append(output)
        stream, _ = layer.join(outputs, stream)
    close(model.model.stages[0](hidden, span)[0], stream)
    ids = random_ids(2, 6)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_path_keeps_its_options_and_takes_the_others() -> None:
    stages = [{"parallel": {"paths": {"a": {"attention": {"heads": 2}}, "b": {}}, "attention": {"window": 3}}}]
    config = tiny_config(stages=stages, block={"norm": "layer", "attention": {"kind": "softmax", "bias": True}})
    a, b = config.decoded.stages[0].options.paths
    assert (a.attention.options.heads, b.attention.options.heads) == (2, 8)
    for path in (a, b):
        assert path.norm.kind == "layer"
        assert path.attention.options.window == 3
        assert path.attention.options.bias


@pytest.mark.parametrize(
    "paths", [2, ["path_1", "path_2"], {"path_1": {}, "path_2": None}, [{"name": "path_1"}, "path_2"]], ids=str
)
def test_paths_can_be_written_in_four_ways(paths: Any) -> None:
    written = tiny_config(stages=[{"parallel": {"paths": paths}}]).architecture
    assert written == tiny_config(stages=[{"parallel": {"paths": 2}}]).architecture


def test_one_path_is_a_path() -> None:
    layer, hidden, span, outputs = first_layer(paths=["only"])
    assert layer.paths is not None
    close(layer(hidden, span)[0], outputs[0] @ layer.join.linear.weight.T)


def test_paths_with_a_part_that_cannot_be_stacked_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(SoftmaxAttention):
        stackable = False

        def __init__(self, config: Any, width: int, dropout: float = 0.0):
            super().__init__(config, width, dropout)

    monkeypatch.setitem(attentions.parts, "alone", Alone)
    layer, *_ = first_layer(attention={"kind": "alone", "heads": 4})
    assert layer.stack is None
    assert list(layer.paths) == ["path_1", "path_2"]


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_block_is_in_one_layer_in_order(depth: int, layers: int) -> None:
    layer_blocks = [blocks_in_layer(depth, layers, layer) for layer in range(layers)]
    assert [block for blocks in layer_blocks for block in blocks] == list(range(depth))
    assert max(map(len, layer_blocks)) - min(map(len, layer_blocks)) <= 1


def test_the_last_layer_may_change_the_width() -> None:
    model = path_model(layers=3, to=24, architecture={"tie_embeddings": False})
    assert [layer.width_out for layer in model.model.stages[0].layers] == [16, 16, 24]
    assert model.model.norm.weight.shape == model.head.weight.shape[1:] == (24,)


def test_a_projection_is_one_product() -> None:
    stages = ["block", {"project": {"to": 8, "bias": True}}, {"parallel": {"paths": 2, "to": 16}}]
    model = tiny_model(torch.float64, stages=stages)
    hidden = torch.randn(1, 3, 16, dtype=torch.float64)
    linear = model.model.stages[1].linear
    actual, routings = model.model.stages[1](hidden, model.model.span(hidden))
    close(actual, hidden @ linear.weight.T + linear.bias)
    assert routings == ()
    assert model.model.stages[2].layers[0].widths == (8, 8)


def test_the_papers_model_has_its_parameters() -> None:
    """PaPaformer's shared linear model at a vocabulary of 50,278: 29.35M, as counted in the authors' code."""
    config = {
        "width": 256,
        "tie_embeddings": False,
        "block": {"attention": {"heads": 8, "out_projection": False}, "feed": {"hidden": 1024, "learned_beta": True}},
        "stages": [
            "block",
            {"project": {"to": 128}},
            {"parallel": {"paths": 2, "layers": 3, "attention": {"heads": 4}, "feed": {"hidden": 512}, "to": 256}},
            "block",
        ],
    }
    assert model_cost(skeleton(BraidConfig(config, vocab_size=50_278))).parameters == pytest.approx(29.35e6, rel=1e-3)


def refused(**changes: Any) -> str:
    """The error for a model that cannot be built."""
    with pytest.raises(BraidError) as caught:
        BraidForCausalLM(tiny_config(**changes))
    return str(caught.value)


STAGE = "model.stages[0].parallel"


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"paths": ["a", "b", "a"]}, f"{STAGE}: paths: 'a' is listed twice"),
        ({"paths": ["a b", "c"]}, f"{STAGE}.paths[0]: a path's name is made of letters, digits, - and _"),
        ({"paths": ["a", "b.c"]}, f"{STAGE}.paths[1]: a path's name is made of letters, digits, - and _"),
        ({"paths": ["a", "2b"]}, "and does not begin with a digit, got '2b'"),
        ({"paths": []}, f"{STAGE}: paths: at least one is needed"),
        ({"paths": 0}, f"{STAGE}.paths: expected a whole number from 1 to 4096, got 0"),
        ({}, f"{STAGE}.paths: missing; it has no default"),
        ({"paths": "a"}, f"{STAGE}.paths: expected a list, got 'a'"),
        ({"paths": {"a": 3}}, f"{STAGE}.paths[0]: expected a mapping, got 3"),
        ({"paths": {"a": {"widht": 8}}}, f"{STAGE}.paths[0]: unknown key 'widht'. Did you mean 'width'?"),
        ({"paths": {"a": {"width": 0}}}, f"{STAGE}.paths[0].width: expected a whole number from 1 to 100000, got 0"),
        ({"paths": {"a": {"depth": 0}}}, f"{STAGE}.paths[0].depth: expected a whole number from 1 to 1000, got 0"),
        ({"paths": 2, "layers": 0}, f"{STAGE}.layers: expected a whole number from 1 to 1000, got 0"),
        ({"paths": 2, "joins": "add"}, f"{STAGE}: unknown key 'joins'. Did you mean 'join'?"),
        ({"paths": 2, "join": "shared_liner"}, f"{STAGE}.join: unknown join 'shared_liner'. Did you mean"),
        ({"paths": 2, "join": "gumbel"}, f"{STAGE}.join: unknown join 'gumbel'. Did you mean 'gumbel_v"),
        ({"paths": 2, "join": {"kind": "gumbel_v1", "hart": True}}, f"{STAGE}.join: unknown key 'hart'. Did you mean"),
        (
            {"paths": 2, "join": {"kind": "gumbel_v1", "losses": {"load_balanse": 1}}},
            f"{STAGE}.join: losses: unknown routing loss 'load_balanse'. Did you mean 'load_balance'?",
        ),
        (
            {"paths": 2, "join": {"kind": "gumbel_v2", "temperature": 0}},
            f"{STAGE}.join.temperature: expected a number above 0 and at most 1e9, got 0",
        ),
        (
            {"paths": 2, "join": {"kind": "gumbel_v2", "sample": "gumble"}},
            f"{STAGE}.join.sample: 'gumble' is not one of gumbel, softmax. Did you mean 'gumbel'?",
        ),
    ],
    ids=str,
)
def test_a_stage_that_is_written_wrongly(parallel: dict[str, Any], text: str) -> None:
    assert text in refused(stages=[{"parallel": parallel}])


@pytest.mark.parametrize(
    ("parallel", "texts"),
    [
        (
            {"paths": ["a", "combined"], "join": "gumbel_v1"},
            ["a path cannot be called 'combined' here: that is the name of all paths together"],
        ),
        (
            {"paths": 2, "to": 24, "join": {"kind": "shared_linear", "residual": True}},
            [
                "a residual around the join needs equal widths, and here 16 becomes 24",
                "leave out `to` and put a project stage after the parallel one",
            ],
        ),
        (
            {"paths": {"a": {"width": 4}, "b": {"width": 8}}, "join": "concat", "to": 16},
            ["widths do not add up: the paths have 4 + 8 = 12 and concat must give 16"],
        ),
        ({"paths": 3, "join": "concat"}, ["width 16 does not divide into 3 paths; give each a width"]),
        (
            {"paths": {"stories": {}, "maths": {"width": 10}}},
            ["path 'maths': width 10 does not divide into 4 heads; set head_dim"],
        ),
        ({"paths": {"a": {"width": 12}, "b": {"width": 12}}}, ["rotary positions need an even head size, got 3"]),
    ],
    ids=str,
)
def test_a_stage_that_cannot_be_built(parallel: dict[str, Any], texts: list[str]) -> None:
    message = refused(stages=[{"parallel": parallel}])
    for text in texts:
        assert text in message


def test_a_tied_head_needs_the_embeddings_width() -> None:
    message = refused(stages=[{"parallel": {"paths": 2, "to": 24}}])
    assert message == "tie_embeddings needs the last stage to end at the embedding's width"
