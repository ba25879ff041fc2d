"""Sparse experts equal every expert on every token with a mask, forward and gradients."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.model.errors import BraidError
from braidlm.model.paths.project import ExpertProjection, ProjectionExpertsConfig, projections
from braidlm.model.routing.dispatch import Groups, grouped_product, is_sparse, sort_by_expert
from braidlm.model.routing.router import RouterConfig
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model


def projection(kind: str, experts: int, top_k: int, bias: bool, **router: object) -> ExpertProjection:
    names = [f"e{i}" for i in range(experts)]
    config = ProjectionExpertsConfig(names, RouterConfig(top_k=top_k, **router), kind, 6)  # type: ignore[arg-type]
    return randomised(projections[kind](config, 8, 4, bias)).double()


def with_both_methods(module: ExpertProjection, rows: Tensor) -> list[list[Tensor]]:
    """Output and gradients of each method."""
    results = []
    for module.compute in ("sparse", "dense"):
        module.zero_grad()
        inputs = rows.clone().requires_grad_()
        out = module(inputs[None])[0][0]
        (out * torch.arange(1.0, 1 + out.shape[1])).square().sum().backward()
        assert inputs.grad is not None
        results.append(
            [out.detach(), inputs.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        )
    return results


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 2), (4, 4), (1, 1)])
def test_sparse_equals_dense(kind: str, experts: int, top_k: int, bias: bool) -> None:
    rows = torch.randn(13, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sparse, dense = with_both_methods(projection(kind, experts, top_k, bias), rows)
    for a, b in zip(sparse, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 20), st.data())
def test_any_choice_is_dispatched(experts: int, count: int, data: st.DataObject) -> None:
    """An expert may have no row at all, or all of them; and the bank may have none."""
    top_k = data.draw(st.integers(1, experts))
    picks = data.draw(st.lists(st.permutations(range(experts)), min_size=count, max_size=count))
    chosen = torch.tensor([pick[:top_k] for pick in picks], dtype=torch.long).view(count, top_k)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, 8, dtype=torch.float64, generator=generator)
    weights = torch.rand(count, top_k, dtype=torch.float64, generator=generator)
    module = projection("swiglu", experts, 1, True)
    permutation = sort_by_expert(chosen, experts)
    sparse = permutation.combine(module.expert_rows(rows[None], permutation), weights)
    weights_TE = torch.zeros(count, experts, dtype=torch.float64).scatter_add(1, chosen, weights)
    dense = (module.expert_outputs(rows[None])[:, 0] * weights_TE.T[..., None]).sum(0)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-10)


def test_weights_add_up_to_one_or_stay_as_they_were() -> None:
    hidden = torch.randn(2, 3, 8, dtype=torch.float64)
    routing = projection("linear", 4, 2, False).router(hidden)
    torch.testing.assert_close(routing.weights_BTK.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    plain = projection("linear", 4, 2, False, renormalise=False).router(hidden)
    torch.testing.assert_close(plain.weights_BTK, plain.probabilities_BTN.topk(2).values)


def test_noise_is_for_training_only() -> None:
    module, hidden = projection("linear", 4, 2, False, noise=1.0), torch.randn(2, 3, 8, dtype=torch.float64)
    module.eval()
    torch.testing.assert_close(module(hidden)[0], module(hidden)[0], rtol=0, atol=0)
    module.train()
    assert not torch.equal(module(hidden)[0], module(hidden)[0])


def test_active_parameters_and_flops_count_the_chosen_experts() -> None:
    def cost(top_k: int) -> tuple[int, int, int]:
        experts = {"names": ["a", "b", "c", "d"], "router": {"top_k": top_k}}
        config = tiny_config(stages=["block", {"project": {"to": 16, "experts": experts}}])
        total = model_cost(skeleton(config))
        return total.parameters, total.active_parameters, total.flops_per_token

    (all_1, active_1, flops_1), (all_2, active_2, flops_2) = cost(1), cost(2)
    assert all_1 == all_2
    assert active_2 - active_1 == 16 * 16
    assert flops_2 - flops_1 == 2 * 16 * 16


def test_routings_have_the_module_name_of_their_router() -> None:
    model = tiny_model(stages=["block", {"project": {"to": 16, "experts": 3}}])
    (routing,) = model(random_ids(2, 5)).routings
    assert routing.name == "stages.1.experts.router"
    assert routing.choices == ("expert_1", "expert_2", "expert_3")
    assert routing.chosen_BTK.shape == (2, 5, 2)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (0, "names: expected a whole number from 1 to 4096, got 0"),
        ({"names": ["a", "b"], "router": {"top_k": 3}}, "top_k is 3, and there are only 2 experts"),
        ({"names": ["a", "a"]}, "a name is given twice"),
        ({"names": ["a", "b"], "router": {"top_k": 0}}, "top_k: expected a whole number from 1 to 4096, got 0"),
        ({"names": ["a", "b"], "kind": "swiglo"}, "unknown projection 'swiglo'. Did you mean 'swiglu'?"),
        (
            {"names": ["a", "b"], "router": {"losses": {"swich": 1.0}}},
            "unknown routing loss 'swich'. Did you mean 'switch'?",
        ),
        ("many", "expected a number of experts or a mapping, got 'many'"),
    ],
)
def test_bad_experts(experts: object, message: str) -> None:
    with pytest.raises(BraidError) as caught:
        tiny_config(stages=[{"project": {"to": 16, "experts": experts}}])
    assert message in str(caught.value)


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_a_router_of_a_half_precision_model_scores_in_float32(norm: str | None) -> None:
    project = {"to": 16, "experts": {"names": 4, "router": {"norm": norm}}}
    model = tiny_model(torch.bfloat16, stages=["block", {"project": project}])
    output = model(random_ids(2, 5))
    assert output.logits.dtype == torch.bfloat16
    assert output.routings[0].probabilities_BTN.dtype == torch.float32


@pytest.fixture
def compiling_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors that have a device, shapes and types and no values, as when `torch.compile` follows a model."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("compiling_for_a_gpu")
def test_every_type_is_compiled_for_a_gpu(dtype: torch.dtype) -> None:
    """Torch's grouped product is compiled in bfloat16 only: in other types all experts are computed."""
    rows, weight = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((128, 16), (2, 16, 16)))
    groups = Groups(torch.empty(2, dtype=torch.long, device="cuda"))
    assert is_sparse("sparse", rows) == (dtype == torch.bfloat16)
    if is_sparse("sparse", rows):
        assert grouped_product(rows, weight, None, groups).shape == rows.shape


@pytest.mark.usefixtures("compiling_for_a_gpu")
def test_autocast_decides_whether_a_gpu_computes_sparsely() -> None:
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    rows = torch.empty(128, 16, device="cuda")
    assert is_sparse("sparse", rows)
    assert not is_sparse("dense", rows)
