"""Models with routed blocks, and three methods to compute them: sparse, dense, and a module for each path."""

from typing import Any

import torch
from torch import Tensor

from braidlm.model.modeling_braid import BraidForCausalLM
from tests.model.parallel_layers import path_model, unstacked
from tests.tiny_models import random_ids

NAMES = [f"path_{number}" for number in range(1, 5)]
TIME = 9
MASKS: dict[str, Tensor | None] = {
    "unpadded": None,
    "left": torch.tensor([[1] * TIME, [0] * 3 + [1] * (TIME - 3), [0] * (TIME - 1) + [1]]),
    "right": torch.tensor([[1] * TIME, [1] * (TIME - 3) + [0] * 3, [1] + [0] * (TIME - 1)]),
}


def routed_model(
    join: dict[str, Any], architecture: dict[str, Any] | None = None, stacked: bool = True, **parallel: Any
) -> BraidForCausalLM:
    """Two layers of four paths in float64, without routing losses, which are computed in float32."""
    join = {"kind": "routed", "losses": {}, **join}
    return path_model(architecture=architecture, **{"layers": 2, "paths": 4, **parallel}, join=join, stacked=stacked)


def by_all_methods(
    join: dict[str, Any], architecture: dict[str, Any] | None = None, **parallel: Any
) -> dict[str, BraidForCausalLM]:
    """The same weights computed sparsely, densely and, where whole blocks are routed, by a module for each path."""
    models = {
        compute: routed_model({**join, "compute": compute}, architecture, **parallel) for compute in ("sparse", "dense")
    }
    models["dense"].load_state_dict(models["sparse"].state_dict())
    if join.get("per") != "sublayer":
        models["plain"] = routed_model(join, architecture, stacked=False, **parallel)
        models["plain"].load_state_dict(unstacked(models["sparse"].state_dict(), NAMES))
    return models


def outcome(model: BraidForCausalLM, mask: Tensor | None = None, time: int = TIME) -> dict[str, Tensor]:
    """Logits of real tokens, the loss, and every gradient, under its name in a model with a module for each path."""
    ids = random_ids(3, time)
    real = torch.ones_like(ids) if mask is None else mask
    model.zero_grad()
    output = model.train()(ids, attention_mask=mask, labels=ids.masked_fill(real == 0, -100))
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return unstacked(gradients, NAMES) | {"logits": output.logits[real.bool()], "loss": output.loss}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0.0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
