"""Inactive paths and frozen parts: an inactive path adds nothing, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import braidlm
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.core.reading import read_json
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import joins
from braidlm.model.paths.switches import path_names, use_paths
from braidlm.model.routing.router import TopKRouter
from tests.model.parallel_layers import first_layer, path_model
from tests.tiny_models import random_ids, tiny_model

NAMES = ["stories", "maths", "code"]


def logits(model: BraidForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, 7), use_cache=False).logits


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.0, atol=1e-12)


def test_names_come_in_order_and_once() -> None:
    stages = [{"parallel": {"paths": ["b", "a"]}}, {"parallel": {"paths": ["a", "c"], "layers": 2}}]
    assert path_names(tiny_model(stages=stages)) == ("b", "a", "c")
    assert path_names(tiny_model()) == ()


@pytest.mark.parametrize("stacked", [True, False])
def test_an_inactive_path_is_one_whose_part_of_the_linear_layer_is_zero(stacked: bool) -> None:
    model = path_model(paths=NAMES, layers=2, stacked=stacked)
    whole = logits(model)
    use_paths(model, ["stories", "code"])
    restricted = logits(model)
    assert not torch.allclose(restricted, whole)
    use_paths(model, None)
    close(logits(model), whole)
    for layer in model.model.stages[0].layers:
        layer.join.linear.weight.data[:, 16:32] = 0
    close(logits(model), restricted)


@pytest.mark.parametrize("kind", joins)
def test_nothing_of_an_inactive_path_is_left(kind: str) -> None:
    """Its weights can be anything: a data owner who withdraws a part withdraws all of it."""
    model = path_model(paths={"a": {}, "b": {}, "c": {}, "d": {}}, layers=2, join=kind, attention={"heads": 2})
    use_paths(model, ["a", "c", "d"])
    before = logits(model)
    for layer in model.model.stages[0].layers:
        for parameter in layer.stack.parameters():
            parameter.data[1] += 1.0
    close(logits(model), before)
    use_paths(model, None)
    assert not torch.allclose(logits(model), before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sample", ["gumbel", "softmax"])
@pytest.mark.parametrize("kind", ["gumbel_v1", "gumbel_v2"])
def test_a_router_never_chooses_an_inactive_path(kind: str, sample: str, training: bool) -> None:
    model = path_model(paths=NAMES, layers=2, join={"kind": kind, "sample": sample}).train(training)
    for layer in model.model.stages[0].layers:
        # Every token chooses maths.
        layer.join.router.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0], dtype=torch.float64)
    ids = random_ids(3, 20)
    assert all((r.main_BT == 1).float().mean() > 0.9 for r in model(ids).routings)
    use_paths(model, ["stories", "code"])
    for routing in model(ids).routings:
        assert routing.choices == (*NAMES, "combined")
        assert routing.probabilities_BTN[..., 1].max() == 0
        assert routing.weights_BTN[..., 1].max() == 0
        torch.testing.assert_close(routing.weights_BTN.sum(-1), torch.ones(3, 20))
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"scope": "routed"}, {"balance_rate": 0.1}, {"noise": 1.0}], ids=str)
@pytest.mark.parametrize("per", ["block", "sublayer"])
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_a_routed_join_never_chooses_an_inactive_path(
    compute: str, per: str, options: dict[str, Any], training: bool
) -> None:
    join = {"kind": "routed", "top_k": 1, "per": per, "compute": compute, **options}
    model = path_model(paths=NAMES, layers=2, join=join).train(training)
    routers = [part for part in model.modules() if isinstance(part, TopKRouter)]
    assert len(routers) == (2 if per == "block" else 4)
    for router in routers:  # every token chooses maths
        router.scores.bias.data = torch.tensor([0.0, 9.0, 0.0], dtype=torch.float64)
        if router.balance is not None:
            router.balance.copy_(torch.tensor([0.0, 5.0, 0.0]))
    ids = random_ids(3, 20)
    assert all((r.main_BT == 1).float().mean() > 0.9 for r in model(ids).routings)
    use_paths(model, ["stories", "code"])
    for routing in model(ids).routings:
        assert routing.choices == tuple(NAMES)
        assert (routing.chosen_BTK != 1).all()
        assert routing.probabilities_BTN[..., 1].max() == 0
        torch.testing.assert_close(routing.weights_BTK.sum(-1), torch.ones(3, 20, dtype=torch.float64))
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    use_paths(model, None)
    assert all((r.main_BT == 1).float().mean() > 0.9 for r in model(ids).routings)


def test_a_single_active_path_gets_every_token_where_two_are_chosen() -> None:
    model = path_model(paths=NAMES, join={"kind": "routed", "top_k": 2})
    use_paths(model, ["code"])
    (routing,) = model(random_ids(2, 7)).routings
    torch.testing.assert_close(routing.weights_BTN, torch.tensor([0.0, 0.0, 1.0]).double().expand(2, 7, 3))


def test_add_without_a_path_is_the_stream_and_the_other_changes() -> None:
    layer, hidden, span, (a, _, c) = first_layer(paths=NAMES, join="add")
    layer.join.inactive = frozenset({"maths"})
    close(layer(hidden, span)[0], hidden + (a - hidden) + (c - hidden))


def test_concat_has_zeros_for_an_inactive_path() -> None:
    layer, hidden, span, (a, _) = first_layer(join="concat", attention={"heads": 2})
    layer.join.inactive = frozenset({"path_2"})
    joined, _ = layer(hidden, span)
    close(joined[..., :8], a)
    assert joined[..., 8:].abs().max() == 0


def test_a_name_deactivates_it_in_every_stage() -> None:
    stages = [{"parallel": {"paths": ["a", "b"]}}, {"parallel": {"paths": ["b", "c"]}}]
    model = tiny_model(stages=stages)
    use_paths(model, ["a", "c"])
    assert [stage.layers[0].join.inactive for stage in model.model.stages] == [{"b"}, {"b"}]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["storis"], "the model has no path 'storis'. Did you mean 'stories'?"),
        (["stories", "zzz"], "the model has no path 'zzz'. There are: code, maths, stories."),
        ([], "at least one path must be active\nThe model has stories, maths, code."),
    ],
)
def test_paths_that_cannot_be_chosen(names: list[str], text: str) -> None:
    model = path_model(paths=NAMES)
    before = logits(model)
    with pytest.raises(BraidError) as caught:
        use_paths(model, names)
    assert str(caught.value) == text
    close(logits(model), before)


def test_a_model_without_paths_has_none_to_choose() -> None:
    with pytest.raises(BraidError, match="this model has no paths to choose from"):
        use_paths(tiny_model(), ["stories"])
    use_paths(tiny_model(), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(path_model(paths=NAMES, layers=2).float(), tmp_path / "m", None, {"made_by": "a test"})


def test_loading_with_chosen_paths(folder: Path) -> None:
    whole = load_model(folder)
    use_paths(whole, ["stories"])
    expected = logits(whole)
    for loaded in (
        load_model(folder, paths=["stories"]),
        braidlm.load_model(folder, paths=("stories",)),
        BraidForCausalLM.from_pretrained(folder, paths=["stories"]).eval(),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, paths=["stories"]).eval(),
    ):
        assert torch.equal(logits(loaded), expected)
        assert loaded.config.paths == ["stories"]
    assert load_model(folder).config.paths is None
    assert not torch.equal(logits(load_model(folder)), expected)


def test_a_folder_remembers_its_inactive_paths(folder: Path, tmp_path: Path) -> None:
    restricted = load_model(folder, paths=["stories", "code"])
    again = save_model(restricted, tmp_path / "restricted", None, {"made_by": "a test"})
    assert read_json(again / "config.json")["paths"] == ["stories", "code"]
    assert torch.equal(logits(load_model(again)), logits(restricted))
    assert torch.equal(logits(load_model(again, paths=NAMES)), logits(load_model(folder)))


def test_loading_with_a_path_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        load_model(folder, paths=["maht"])
    assert str(caught.value) == f"{folder}: the model has no path 'maht'. Did you mean 'maths'?"
    with pytest.raises(BraidError, match=r"the model has no path 'maht'. Did you mean 'maths'\?"):
        BraidForCausalLM.from_pretrained(folder, paths=["maht"])
    plain = save_model(tiny_model(), tmp_path / "plain", None, {"made_by": "a test"})
    with pytest.raises(BraidError) as caught:
        load_model(plain, paths=["stories"])
    assert str(caught.value) == f"{plain}: this model has no paths to choose from"


@pytest.mark.parametrize("kind", joins)
@pytest.mark.parametrize("others", [["b", "c"], {"b": {}, "c": {"width": 8}}], ids=["stacked", "one by one"])
def test_a_stage_without_an_active_path_adds_what_its_join_makes_of_nothing(kind: str, others: Any) -> None:
    """The weights of its paths say nothing any more, and a cache or gradients change nothing."""
    first = {"parallel": {"paths": ["a", "b"], "join": "add"}}
    model = tiny_model(stages=[first, {"parallel": {"paths": others, "layers": 2, "join": kind}}])
    use_paths(model, ["a"])
    before, ids = logits(model), random_ids(2, 7)
    assert before.isfinite().all()
    with torch.no_grad():
        close(model(ids).logits, before)
    close(model(ids, use_cache=False).logits.detach(), before)
    for layer in model.model.stages[1].layers:
        for parameter in (layer.stack or layer.paths).parameters():
            parameter.data.normal_()
    close(logits(model), before)
