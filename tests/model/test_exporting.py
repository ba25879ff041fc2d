"""torch.export of a model computes what the model does at every length and number of texts; experts are dense then."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.export import Dim

from braidlm.core.errors import BraidError
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.compat.tiny_folders import TINY
from tests.tiny_models import VOCABULARY, random_ids, randomised, tiny_model

SIZES = ((1, 1), (3, 7), (2, 80))
OTHERS = {
    "parts that no tiny recipe has": {
        "context": 128,
        "stages": [
            {"block": {"attention": {"kind": "stick_breaking", "heads": 4, "experts": {"names": 3, "keys": "shared"}}}},
            {"block": {"attention": {"experts": {"names": 3, "scope": "routed", "router": {"compute": "sparse"}}}}},
        ],
        "gates": {"kind": "vector"},
        "compression": [{"int8": {"modules": ["stages.1.*"]}}],
    },
    "a head that reads the text": {
        "stages": [{"parallel": {"paths": {"a": {"width": 8}, "b": {"width": 8}}, "join": "concat"}}],
        "norm": {"kind": "per_path", "paths": [{"name": "a", "width": 8}, {"name": "b", "width": 8}]},
        "head": {"kind": "posterior", "paths": [{"name": "a", "width": 8}, {"name": "b", "width": 8}]},
        "tie_embeddings": False,
    },
}


def shallow(options: Any) -> Any:
    """A stage with as few layers as show what it does."""
    least = 4 if getattr(options, "share", None) else getattr(options, "every", 1)
    return replace(options, layers=min(options.layers, least)) if hasattr(options, "layers") else options


def model_of(name: str) -> BraidForCausalLM:
    if name in OTHERS:
        return tiny_model(**OTHERS[name])
    architecture = TINY[name].architecture
    architecture = replace(architecture, stages=[replace(s, options=shallow(s.options)) for s in architecture.stages])
    return randomised(BraidForCausalLM(BraidConfig(architecture, VOCABULARY))).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*TINY, *OTHERS])
@torch.no_grad()
def test_an_exported_program_is_the_model_at_every_length(name):
    model = model_of(name)
    model.config.use_cache = False
    expected = {size: model(random_ids(*size)) for size in SIZES}
    program = torch.export.export(model, (random_ids(2, 9),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    exported = program.module()
    for size, plain in expected.items():
        computed = exported(random_ids(*size))
        torch.testing.assert_close(computed.logits, plain.logits, atol=1e-5, rtol=1e-5)
        for own, other in zip(computed.routings or (), plain.routings or (), strict=True):
            assert own.name == other.name
            torch.testing.assert_close(own.weights_BTN, other.weights_BTN)


def test_a_model_of_bytes_is_exported_once_it_has_read_a_text():
    with pytest.raises(BraidError, match="Call the model once before"):
        torch.export.export(model_of("byte-pooling"), (random_ids(2, 9),))
