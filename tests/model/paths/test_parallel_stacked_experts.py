"""Stacks of paths with experts: one bank serves all paths, and names, switches and errors are those of each path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.model.config.registry import Choice
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.norms import RMSNorm
from braidlm.model.routing.router import RouterConfig, RouterStack
from tests.model.parallel_layers import attention_experts, both_forms, experts, path_model, unstacked
from tests.tiny_models import random_ids, randomised

ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "as the softmax gives them": {"renormalise": False, "bias": False, "top_k": 1},
    "silent": {"silent": 2, "renormalise": False},
    "two layers": {"hidden": 5},
    "normalised": {"norm": Choice("rms", RMSNorm.Config())},
    "balanced": {"balance_rate": 0.1},
}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.0, atol=1e-10)


def routings_of(model: BraidForCausalLM) -> dict[str, Any]:
    return {routing.name: routing for routing in model(random_ids(2, 7), use_cache=False).routings}


@settings(max_examples=40, deadline=None)
@given(
    router=st.sampled_from(list(ROUTERS)),
    members=st.integers(1, 4),
    batch=st.integers(1, 3),
    time=st.integers(1, 4),
    off=st.sets(st.tuples(st.integers(0, 3), st.sampled_from("abc"))),
    seed=st.integers(0, 99),
)
def test_routers_choose_together_as_they_do_one_by_one(
    router: str, members: int, batch: int, time: int, off: set[tuple[int, str]], seed: int
) -> None:
    stack = randomised(
        RouterStack(RouterConfig(**ROUTERS[router]), 6, "abcd", [f"m{i}" for i in range(members)]), seed
    ).double()
    for index, (member, own) in enumerate(stack.items()):
        own.address = member
        own.inactive = frozenset(name for number, name in off if number == index)
    hidden = torch.randn(members, batch, time, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for found, wanted in zip(stack(hidden), stack.one_by_one(hidden), strict=True):
        assert (found.name, found.choices, found.losses) == (wanted.name, wanted.choices, wanted.losses)
        assert torch.equal(found.chosen_BTK, wanted.chosen_BTK)
        close(found.probabilities_BTN, wanted.probabilities_BTN)
        close(found.weights_BTK, wanted.weights_BTK)
        close(found.scores_BTN, wanted.scores_BTN)


@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_each_path_has_its_routings_under_the_names_that_it_has_alone(compute: str) -> None:
    switch = {"compute": compute, "losses": {"switch": 0.1}}
    stacked, plain = both_forms({"layers": 2, **experts(3, **switch), **attention_experts(**switch)}, 2)
    found, wanted = routings_of(stacked), routings_of(plain)
    assert set(found) == set(wanted)
    assert {f"stages.0.layers.1.paths.path_2.0.{part}.router" for part in ("attention", "feed")} <= set(found)
    for name, routing in wanted.items():
        assert found[name].losses == routing.losses
        assert torch.equal(found[name].chosen_BTK, routing.chosen_BTK)
        close(found[name].probabilities_BTN, routing.probabilities_BTN)
    losses = [model.train()(random_ids(2, 7), labels=random_ids(2, 7)).loss for model in (stacked, plain)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "names", [["expert_2"], ["stages.0.layers.1:expert_3"], ["stages.0.layers.0.paths.path_2*:expert_1"]], ids=str
)
def test_modules_are_switched_off_by_name(names: list[str]) -> None:
    stacked, plain = both_forms({"layers": 2, **experts(3, shared=4), **attention_experts("shared")}, 2)
    ids, whole = random_ids(2, 7), stacked(random_ids(2, 7)).logits
    for model in (stacked, plain):
        model.switch_off(*names)
    close(stacked(ids).logits, plain(ids).logits)
    assert not torch.allclose(stacked(ids).logits, whole)
    stacked.switch_off()
    assert torch.equal(stacked(ids).logits, whole)


def test_sparse_and_dense_are_equal_with_dropout_off_and_in_half_precision() -> None:
    (sparse, _), (dense, _) = (both_forms({"layers": 2, **experts(4, compute=c)}, 3) for c in ("sparse", "dense"))
    dense.load_state_dict(sparse.state_dict())
    ids = random_ids(2, 7)
    close(sparse(ids).logits, dense(ids).logits)
    whole = sparse(ids).logits
    torch.testing.assert_close(sparse.bfloat16()(ids).logits.double(), whole, rtol=0.1, atol=0.3)
    assert {r.probabilities_BTN.dtype for r in routings_of(sparse).values()} == {torch.float32}


def test_an_error_says_which_routers_it_comes_from() -> None:
    stacked, _ = both_forms(experts(3), 2)
    stacked.get_parameter("model.stages.0.layers.0.stack.0.feed.router.path_2.scores.weight").data[0, 0] = torch.nan
    with pytest.raises(
        BraidError, match=r"paths\.path_1\.0\.feed\.router or that of another path: the router's scores are not numbers"
    ):
        stacked(random_ids(1, 3))


@pytest.mark.slow
def test_compiling_changes_nothing() -> None:
    stacked, plain = both_forms(experts(3, shared=4), 2)
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


def has_stack(**stage: Any) -> bool:
    return path_model(**stage).model.stages[0].layers[0].stack is not None


def test_what_is_not_stacked_runs_one_by_one() -> None:
    assert has_stack(**experts(3))
    assert not has_stack(**{**experts(3), "stacked": True}), "as folders were before experts could be stacked"
    assert not has_stack(**experts(3, top_k=1, new=["expert_3"])), "of inserted modules some rows are trained"
    assert not has_stack(**experts(3), join="routed"), "a router chooses among the paths"
    assert has_stack(**experts(3), attention={"heads": 2, "experts": 2})
    assert not has_stack(paths=3, attention={"heads": 2, "experts": 2})
    assert has_stack(paths=3, stacked="with_experts", join={"kind": "routed", "compute": "sparse"}), "no experts inside"


def test_a_folder_with_a_stack_opens(tmp_path: Path) -> None:
    parts = [{"name": "a", "width": 16}, {"name": "b", "width": 16}]
    stage = {"paths": parts, "layers": 2, "join": "concat", "attention": {"heads": 2}, **experts(3, shared=4)}
    averaged = {
        "width": 32,
        "norm": {"kind": "per_path", "paths": parts},
        "head": {"kind": "mixture", "paths": parts, "per_token": True},
    }
    model = path_model(architecture=averaged, **stage)
    folder = save_model(model.float(), tmp_path / "m", None, {"made_by": "a test"})
    assert torch.equal(load_model(folder)(random_ids(2, 5)).logits, model(random_ids(2, 5)).logits)
