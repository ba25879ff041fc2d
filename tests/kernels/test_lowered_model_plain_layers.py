"""Parts that kernels do not serve: layers of one shape are compiled once, and their routings keep their names."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch._dynamo.testing import CompileCounter

from braidlm.kernels.lowered_model import LoweredModel
from tests.tiny_models import random_ids, randomised, tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "depths in evaluation": {"stages": [{"mixture_of_depths": {"layers": 4, "every": 1}}]},
    "experts inside depths": {
        "stages": [{"mixture_of_depths": {"layers": 3, "every": 1}}],
        "block": {"feed": {"kind": "mlp", "experts": {"names": 3}}},
    },
    "experts with an option that no kernel honours": {
        "stages": [{"block": {"layers": 3}}],
        "block": {"feed": {"kind": "mlp", "experts": {"names": 3, "router": {"sampled": 1}}}},
    },
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_layers_of_one_shape_are_compiled_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    model = randomised(tiny_model(**options)).to(device).eval()
    ids = random_ids(2, 12).to(device)
    with torch.no_grad():
        embedded = model.model.embedding(ids)
        plain, expected = model.model.stream(embedded, model.model.span(embedded))
        hidden, routings, _ = LoweredModel(model, compile_plain=True).stream(ids)
    torch.testing.assert_close(hidden, plain, rtol=0, atol=1e-4)
    assert [routing.name for routing in routings] == [routing.name for routing in expected]
    assert counter.frame_count == 1
    names = dict(model.model.named_modules())
    assert all(hasattr(names[routing.name], "address") for routing in routings)
    assert all(names[routing.name].address == routing.name for routing in routings)
