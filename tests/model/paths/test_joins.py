"""Joins against straight-line formulas, and the guarantees of each."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.model.paths.joins import joins
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.routing.losses import loads
from braidlm.model.routing.routing import Routings
from braidlm.model.span import Span
from tests.model.parallel_layers import first_layer, path_model
from tests.tiny_models import random_ids, tiny_model


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.0, atol=1e-12)


def joined(layer: ParallelLayer, hidden: Tensor, span: Span) -> Tensor:
    return layer(hidden, span)[0]


def test_every_join_here_is_registered_and_tested() -> None:
    tested = {"shared_linear", "concat", "add", "gumbel_v1", "gumbel_v2", "routed"}
    assert set(joins) == tested, "write the new one's formula"


@pytest.mark.parametrize("bias", [False, True])
def test_shared_linear_reads_all_concatenated(bias: bool) -> None:
    layer, hidden, span, (a, b, c) = first_layer(paths=3, join={"kind": "shared_linear", "bias": bias}, to=16)
    linear = layer.join.linear
    expected = sum(x @ linear.weight[:, 16 * i : 16 * (i + 1)].T for i, x in enumerate((a, b, c)))
    close(joined(layer, hidden, span), expected + linear.bias if bias else expected)
    assert (linear.bias is not None) == bias


def test_shared_linear_of_unequal_widths() -> None:
    layer, hidden, span, (a, b) = first_layer(paths={"a": {"width": 8}, "b": {"width": 24}})
    weight = layer.join.linear.weight
    assert weight.shape == (16, 32)
    close(joined(layer, hidden, span), a @ weight[:, :8].T + b @ weight[:, 8:].T)


def test_concat_concatenates_the_outputs() -> None:
    layer, hidden, span, (a, b) = first_layer(join="concat", attention={"heads": 2})
    assert a.shape[-1] == b.shape[-1] == 8
    result = joined(layer, hidden, span)
    close(result[..., :8], a)
    close(result[..., 8:], b)
    assert not list(layer.join.parameters())


def test_add_adds_the_stream_once() -> None:
    layer, hidden, span, outputs = first_layer(paths=3, join="add")
    changes = [x - hidden for x in outputs]
    close(joined(layer, hidden, span), hidden + sum(changes))
    for parameter in layer.parameters():
        parameter.data.zero_()  # paths that change nothing
    close(joined(layer, hidden, span), hidden)


def test_add_adds_the_stream_once_beside_paths_of_another_width() -> None:
    layer, hidden, span, (a, b, c) = first_layer(paths={"a": {"width": 8}, "b": {}, "c": {"width": 24}}, join="add")
    leave = layer.join.leave
    assert set(leave) == {"a", "c"}
    close(joined(layer, hidden, span), a @ leave["a"].weight.T + b + c @ leave["c"].weight.T)
    for name in ("a", "c"):
        leave[name].weight.data.zero_()
    close(joined(layer, hidden, span), b)
    only, hidden, span, (a, b) = first_layer(paths={"a": {"width": 8}, "b": {"width": 24}}, join="add")
    for name in ("a", "b"):
        only.join.leave[name].weight.data.zero_()
    close(joined(only, hidden, span), hidden)


def test_add_of_normalised_outputs_adds_them_to_the_stream() -> None:
    layer, hidden, span, outputs = first_layer(join={"kind": "add", "norm": "rms"})
    normed = [norm(x) for norm, x in zip(layer.join.norms, outputs, strict=True)]
    close(joined(layer, hidden, span), hidden + sum(normed))


@pytest.mark.parametrize("kind", ["add", "gumbel_v1", "routed"])
def test_joins_at_the_streams_width_may_change_the_width_after_it(kind: str) -> None:
    layer, hidden, span, _ = first_layer(join=kind, to=24, architecture={"tie_embeddings": False})
    result = joined(layer, hidden, span)
    assert result.shape[-1] == 24
    out, layer.join.out = layer.join.out, None
    close(result, joined(layer, hidden, span) @ out.weight.T)


@pytest.mark.parametrize("kind", joins)
def test_a_residual_adds_the_input(kind: str) -> None:
    small = {"attention": {"heads": 2}}
    plain, hidden, span, _ = first_layer(join=kind, **small)
    around, *_ = first_layer(join={"kind": kind, "residual": True}, **small)
    around.load_state_dict(plain.state_dict())
    close(joined(around, hidden, span), hidden + joined(plain, hidden, span))


@pytest.mark.parametrize("norm", ["rms", "layer", {"kind": "layer", "bias": False}], ids=str)
@pytest.mark.parametrize("kind", ["shared_linear", "concat", "gumbel_v1", "gumbel_v2"])
def test_each_path_is_normalised_before_the_join(kind: str, norm: Any) -> None:
    layer, hidden, span, outputs = first_layer(join={"kind": kind, "norm": norm}, attention={"heads": 2})
    normed = []
    for part, x in zip(layer.join.norms, outputs, strict=True):
        shape = (x.shape[-1],)
        if norm == "rms":
            normed.append(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * part.weight)
        else:
            normed.append(F.layer_norm(x, shape, part.weight, part.bias))
    expected, _ = layer.join.join(normed, hidden)
    torch.testing.assert_close(joined(layer, hidden, span), expected, rtol=0.0, atol=1e-9)
    plain = layer.join.norms
    layer.join.norms = None
    assert not torch.allclose(joined(layer, hidden, span), expected)
    assert [tuple(n.weight.shape) for n in plain] == [(x.shape[-1],) for x in outputs]


def gumbel_by_hand(layer: ParallelLayer, outputs: list[Tensor], weights_BTN: Tensor) -> Tensor:
    projected = [
        layer.join.leave[n](x) if n in layer.join.leave else x for n, x in zip(layer.names, outputs, strict=True)
    ]
    projected.append(F.linear(torch.cat(outputs, -1), layer.join.combine.weight, layer.join.combine.bias))
    return sum(weights_BTN[..., i, None] * x for i, x in enumerate(projected))


def scores_by_hand(layer: ParallelLayer, kind: str, outputs: list[Tensor]) -> Tensor:
    combined = F.linear(torch.cat(outputs, -1), layer.join.combine.weight, layer.join.combine.bias)
    read = combined if kind == "gumbel_v1" else torch.cat(outputs, -1)
    return F.linear(read, layer.join.router.weight, layer.join.router.bias)


PATHS = {
    "two": ["a", "b"],
    "four": ["a", "b", "c", "d"],
    "unequal": {"a": {"width": 8}, "b": {}, "c": {"width": 24, "attention": {"heads": 2}}},
}


def routed(layer: ParallelLayer, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
    result, routings = layer(hidden, span)
    assert len(routings) == 1
    return result, routings


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("kind", ["gumbel_v1", "gumbel_v2"])
def test_gumbel_takes_the_most_probable_choice_in_evaluation(kind: str, paths: str) -> None:
    layer, hidden, span, outputs = first_layer(paths=PATHS[paths], join=kind, time=20)
    layer.join.router.bias.data -= scores_by_hand(layer, kind, outputs).mean((0, 1))  # so that choices differ
    scores = scores_by_hand(layer, kind, outputs)
    chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).double()
    result, (routing,) = routed(layer, hidden, span)
    close(result, gumbel_by_hand(layer, outputs, chosen))
    assert routing.choices == (*PATHS[paths], "combined")
    torch.testing.assert_close(routing.probabilities_BTN.double(), scores.softmax(-1), rtol=0.0, atol=1e-6)
    close(routing.weights_BTN.double(), chosen)
    assert torch.equal(routing.main_BT, scores.argmax(-1))
    assert scores.argmax(-1).unique().numel() > 1, "the test should see more than one choice"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["gumbel_v1", "gumbel_v2"])
def test_softmax_routing_weighs_by_probability(kind: str, training: bool, temperature: float) -> None:
    layer, hidden, span, outputs = first_layer(join={"kind": kind, "sample": "softmax", "temperature": temperature})
    layer.train(training)
    weights = (scores_by_hand(layer, kind, outputs) / temperature).softmax(-1)
    result, (routing,) = routed(layer, hidden, span)
    torch.testing.assert_close(result, gumbel_by_hand(layer, outputs, weights), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(routing.weights_BTN.double(), weights, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("norm", [None, "layer"])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_routed_sums_the_most_probable_paths(top_k: int, paths: str, norm: Any, renormalise: bool) -> None:
    join = {"kind": "routed", "top_k": top_k, "norm": norm, "renormalise": renormalise}
    layer, hidden, span, outputs = first_layer(paths=PATHS[paths], join=join, time=20)
    router = layer.join.router
    read = hidden if norm is None else F.layer_norm(hidden, (16,), router.norm.weight, router.norm.bias)
    probabilities = F.linear(read, router.scores.weight, router.scores.bias).softmax(-1)
    best = probabilities.topk(top_k)
    counted = best.values / best.values.sum(-1, keepdim=True) if renormalise else best.values
    weights = torch.zeros_like(probabilities).scatter(-1, best.indices, counted)
    projected = [
        layer.join.leave[n](x) if n in layer.join.leave else x for n, x in zip(layer.names, outputs, strict=True)
    ]
    result, (routing,) = routed(layer, hidden, span)
    close(result, sum(weights[..., i, None] * x for i, x in enumerate(projected)))
    assert routing.name == "stages.0.layers.0.join.router"
    assert routing.choices == tuple(PATHS[paths])
    close(routing.probabilities_BTN, probabilities)
    close(routing.weights_BTN, weights)
    assert best.indices.unique().numel() > 1, "the test should see more than one choice"


def test_the_addresses_are_the_models_names() -> None:
    model = path_model(layers=2, join="gumbel_v1")
    routings = model(random_ids(1, 4)).routings
    assert [routing.name for routing in routings] == ["stages.0.layers.0.join", "stages.0.layers.1.join"]
    for routing in routings:
        assert model.model.get_submodule(routing.name).address == routing.name


@pytest.mark.parametrize("stacked", [True, False])
def test_concat_keeps_paths_separate(stacked: bool) -> None:
    model = path_model(paths=["a", "b"], layers=3, join="concat", attention={"heads": 2}, stacked=stacked)
    stage, hidden = model.model.stages[0], torch.randn(2, 6, 16, dtype=torch.float64)
    span = model.model.span(hidden)
    before = stage(hidden, span)[0]
    for layer in stage.layers:  # everything of b changes
        own = [p[1] for p in layer.stack.parameters()] if stacked else [*layer.paths["b"].parameters()]
        for parameter in own:
            parameter.data += 1.0
    hidden[..., 8:] += 1.0
    after = stage(hidden, span)[0]
    close(after[..., :8], before[..., :8])
    assert (after[..., 8:] - before[..., 8:]).abs().amax(-1).min() > 0.1


def test_concat_of_unequal_paths_reads_their_own_slices_again() -> None:
    model = path_model(
        paths={"a": {"width": 4, "attention": {"heads": 2}}, "b": {"width": 12, "attention": {"heads": 2}}},
        layers=2,
        join="concat",
    )
    stage, hidden = model.model.stages[0], torch.randn(2, 6, 16, dtype=torch.float64)
    span = model.model.span(hidden)
    streams = {"a": hidden[..., :4], "b": hidden[..., 4:]}
    for layer in stage.layers:
        assert not list(layer.enter)
        for name, stream in streams.items():
            (block,) = layer.blocks(name)
            streams[name] = block(stream, span)[0]
    close(stage(hidden, span)[0], torch.cat(list(streams.values()), -1))


def test_concat_may_widen_the_stream_in_its_first_layer() -> None:
    widths = {"a": {"width": 12}, "b": {"width": 12}}
    model = path_model(
        paths=widths, layers=2, join="concat", attention={"head_dim": 4}, architecture={"tie_embeddings": False}
    )
    first, second = model.model.stages[0].layers
    assert (first.reads_own_slice, second.reads_own_slice) == (False, True)
    assert (first.enter is not None, second.enter is not None) == (True, False)
    assert model.model.width_out == 24


@pytest.mark.parametrize("scope", ["all", "routed"])
@torch.no_grad()
def test_routers_within_routed_paths_count_the_tokens_that_took_the_path(scope: str) -> None:
    feed = {"hidden": 8, "experts": {"names": 3, "router": {"top_k": 1}}}
    stage = {"layers": 1, "paths": ["a", "b"], "join": {"kind": "routed", "top_k": 1, "scope": scope}, "feed": feed}
    model = tiny_model(stages=[{"parallel": stage}])
    inner_a, inner_b, outer = model(random_ids(2, 9), use_cache=False).routings
    for index, inner in enumerate((inner_a, inner_b)):
        assert torch.equal(inner.present_BT, (outer.chosen_BTK == index).any(-1))
    assert (inner_a.present_BT ^ inner_b.present_BT).all()
    real = torch.ones(2, 9)
    assert loads((inner_a,), real)[inner_a.name].sum() == pytest.approx(1.0 if inner_a.present_BT.any() else 0.0)
