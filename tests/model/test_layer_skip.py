"""Layer dropout, passes that end after an early layer, and transformers' drafts by early layers."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from braidlm.kernels.lower import replace_parts
from braidlm.kernels.lowered_parts import Lowered
from braidlm.model.dropout import scale_dropout
from braidlm.model.errors import BraidError
from braidlm.model.layer_skip import LayerDropout, exit_layers, run_layers
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.losses import routing_loss
from tests.tiny_models import random_ids, tiny_config, tiny_model

DEEP: list[Any] = [{"block": {"layers": 3}}, "block", {"block": {"layers": 2}}]
PATHS: list[Any] = ["block", {"parallel": {"paths": 2, "layers": 2}}, "block"]
EXPERTS: list[Any] = [{"block": {"layers": 4, "feed": {"kind": "mlp", "hidden": 8, "experts": 3}}}]
NARROW: list[Any] = ["block", {"project": {"to": 8}}, {"block": {"layers": 2}}, {"project": {"to": 16}}, "block"]
SHAPES = {"deep": DEEP, "paths": PATHS, "experts": EXPERTS, "narrow": NARROW}
WHOLE = {name: tiny_model(torch.float64, stages=stages) for name, stages in SHAPES.items()}


def drops(model: BraidForCausalLM) -> list[LayerDropout]:
    return [module for module in model.modules() if isinstance(module, LayerDropout)]


def leave(model: BraidForCausalLM, layer: int) -> BraidForCausalLM:
    model.config.num_hidden_layers = layer
    return model


def logits(model: BraidForCausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_rates_rise_from_0_to_the_given_one() -> None:
    rates = [drop.rate for drop in drops(tiny_model(stages=DEEP, dropout={"layer": 0.4}))]
    assert rates == pytest.approx([0.4 * (2 ** (layer / 5) - 1) for layer in range(6)])
    assert drops(tiny_model(stages=DEEP)) == []


def test_a_layer_that_changes_the_width_is_never_dropped() -> None:
    stages = ["block", {"parallel": {"paths": 2, "layers": 2, "to": 8, "attention": {"heads": 2}}}]
    rates = [drop.rate for drop in drops(tiny_model(stages=stages, dropout={"layer": 0.4}, tie_embeddings=False))]
    assert rates[0] == 0 < rates[1]
    assert rates[2] == 0


def test_one_rate_for_all_kinds_drops_no_layers() -> None:
    config = tiny_config(dropout=0.2).decoded.dropout
    assert (config.attention, config.residual, config.embedding, config.layer) == (0.2, 0.2, 0.2, 0.0)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "recomputed"])
def test_rows_that_are_left_out_cost_nothing_and_change_nothing(checkpointing: bool) -> None:
    """The rows alone against the masked reference, gradients too."""
    model, results = tiny_model(torch.float64, stages=DEEP, dropout={"layer": 0.5}).train(), []
    replace_parts(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    rows: list[int] = []
    model.model.stages[2].layers[1].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    for can_skip in (False, True):
        for drop in drops(model):
            drop.can_skip_rows = can_skip
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(random_ids(8, 7), labels=random_ids(8, 7)).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for masked, skipped in zip(*results, strict=True):
        torch.testing.assert_close(masked, skipped, rtol=0, atol=1e-12)
    assert rows[0] == 8
    assert 0 < rows[-1] < 8


def test_texts_pass_by_as_often_as_the_rate_says() -> None:
    drop = LayerDropout(0.3, torch.nn.Identity())
    drop.scale = 0.5
    hidden = torch.ones(20_000, 1, 1, requires_grad=True)
    span = tiny_model().model.span(hidden[:1])
    for kept in (drop.run(lambda x, _: (x + 1, ()), hidden, span)[0] == 2 for _ in range(2)):
        assert kept.double().mean().item() == pytest.approx(0.85, abs=0.01)
    drop.eval()
    assert bool((drop.run(lambda x, _: (x + 1, ()), hidden, span)[0] == 2).all())


def test_a_compiled_step_reads_the_probability_from_a_tensor() -> None:
    """Another one needs no other code."""
    drop, traces = LayerDropout(0.3, torch.nn.Identity()), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traces.append(graph)
        return graph.forward

    drop.passing = torch.tensor(0.0)
    hidden = torch.ones(1000, 1, 1)
    span = tiny_model().model.span(hidden[:1])
    run = torch.compile(lambda x: drop.run(lambda y, _: (y + 1, ()), x, span)[0], backend=backend)
    for probability, kept in ((0.0, 1000), (1.0, 0), (0.0, 1000)):
        drop.passing.fill_(probability)
        drop.scale = probability
        assert int((run(hidden) == 2).sum()) == kept
    assert len(traces) == 1


def test_a_layer_that_nobody_keeps_has_zero_gradients() -> None:
    model = tiny_model(stages=[{"block": {"layers": 2}}], dropout={"layer": 0.999999}).train()
    model(random_ids(2, 5), labels=random_ids(2, 5)).loss.backward()
    for parameter in model.model.stages[0].layers[1].parameters():
        assert parameter.grad is not None
        assert not bool(parameter.grad.any())


def test_evaluation_and_a_scale_of_0_drop_nothing() -> None:
    model, plain = tiny_model(stages=DEEP, dropout={"layer": 0.9}), tiny_model(stages=DEEP)
    ids = random_ids(3, 7)
    assert torch.equal(logits(model, ids), logits(plain, ids))
    scale_dropout(model.train(), 0.0)
    assert torch.equal(logits(model, ids), logits(plain, ids))


def test_routings_of_dropped_layers_are_whole() -> None:
    model = tiny_model(stages=EXPERTS, dropout={"layer": 0.9}).train()
    ids = random_ids(4, 6)
    routings = model.model(ids).routings
    assert routings is not None
    assert all(routing.chosen_BTK.shape[:2] == ids.shape for routing in routings)
    assert routing_loss(routings, torch.ones_like(ids, dtype=torch.bool)).isfinite()


def test_padding_and_dropped_layers_go_together() -> None:
    model = tiny_model(stages=DEEP, dropout={"layer": 0.5}).train()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    output = model(random_ids(2, 4), attention_mask=mask, labels=random_ids(2, 4))
    output.loss.backward()
    assert output.loss.isfinite()


def test_kernels_leave_models_that_skip_layers_alone() -> None:
    model = tiny_model(stages=DEEP, dropout={"layer": 0.1})
    assert Lowered(model).serves_layers, "evaluation drops nothing"
    assert not Lowered(model.train()).serves_layers
    assert "texts pass by layers at random" in Lowered(model).summary()
    early = leave(tiny_model(stages=DEEP), 2)
    assert not Lowered(early).serves_layers
    assert "passes end after layer 2" in Lowered(early).summary()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exit_reads_the_stream_after_its_layer(shape: str) -> None:
    model, ids = tiny_model(torch.float64, stages=SHAPES[shape]), random_ids(2, 7)
    body = model.model
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    depth = model.config.num_hidden_layers
    exits = exit_layers(body.stages, body.width_out)
    assert exits == ([1, 4] if shape == "narrow" else list(range(1, depth + 1)))
    for layer in exits[:-1]:
        expected = model.head(body.norm(states[layer])).detach()
        torch.testing.assert_close(logits(leave(model, layer), ids), expected, rtol=0, atol=1e-12)
        assert len(model(ids, output_hidden_states=True).hidden_states) == layer + 1
        leave(model, depth)


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data())
def test_a_pass_may_be_made_in_pieces(shape: str, data: st.DataObject) -> None:
    body, ids = WHOLE[shape].model, random_ids(2, 5)
    depth = body.config.num_hidden_layers
    cuts = sorted(data.draw(st.sets(st.integers(1, depth - 1))))
    with torch.no_grad():
        embedded = body.embedding(ids)
        span = body.span(embedded)
        hidden = body.enter(embedded, span)
        whole, routings = run_layers(body.stages, hidden, span)
        names: tuple[str, ...] = ()
        for first, last in zip([0, *cuts], [*cuts, None], strict=True):
            hidden, some = run_layers(body.stages, hidden, span, first, last)
            names += tuple(routing.name for routing in some)
    assert torch.equal(hidden, whole)
    assert names == tuple(routing.name for routing in routings)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_gives_the_full_forward_of_an_exit(shape: str) -> None:
    model, ids = tiny_model(torch.float64, stages=SHAPES[shape]), random_ids(2, 8)
    leave(model, exit_layers(model.model.stages, 16)[0])
    cache, got = DynamicCache(), []
    with torch.no_grad():
        for piece in ids.split([3, 1, 4], dim=1):
            got.append(model(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, dim=1), logits(model, ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("stages", "layer", "exits"),
    [(DEEP, 7, "1, 2, 3, 4, 5, 6"), (DEEP, 0, "1, 2, 3, 4, 5, 6"), (NARROW, 2, "1, 4"), (NARROW, 3, "1, 4")],
)
def test_a_model_is_not_left_where_its_head_cannot_read(stages: list[Any], layer: int, exits: str) -> None:
    model, ids = tiny_model(stages=stages), random_ids(1, 4)
    whole = logits(model, ids)
    with pytest.raises(BraidError, match=f"cannot be left after layer {layer}\n.*after layers {exits}"):
        logits(leave(model, layer), ids)
    assert torch.equal(logits(model, ids), whole), "the model is as it was"


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_of_transformers_are_made_by_the_first_layers(shape: str) -> None:
    model, ids = tiny_model(torch.float64, stages=SHAPES[shape]), random_ids(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    early = exit_layers(model.model.stages, 16)[0]
    runs = {"first": 0, "last": 0}
    for name, layer in (("first", model.model.stages[0].layers[0]), ("last", model.model.stages[-1].layers[-1])):
        layer.register_forward_pre_hook(lambda *_, name=name: runs.update({name: runs[name] + 1}))
    drafted = model.generate(ids, assistant_early_exit=early, **options)
    assert drafted.tolist() == plain.tolist()
    assert runs["first"] > runs["last"] > 0, "the last layer only verifies"
    with pytest.raises(BraidError, match="cannot be left after layer 99"):
        model.generate(ids, assistant_early_exit=99, **options)
    assert model.generate(ids, **options).tolist() == plain.tolist()


def test_a_copy_and_a_saved_configuration_are_of_the_whole_model() -> None:
    model = leave(tiny_model(stages=DEEP), 2)
    assert copy.deepcopy(model).config.num_hidden_layers == 2
    assert type(model.config).from_dict(model.config.to_dict()).num_hidden_layers == 6
