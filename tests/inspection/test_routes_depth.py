"""Who goes where in a mixture of depths: which tokens enter a block, and what the experts inside it get."""

import csv
from pathlib import Path

import pytest
import torch

from braidlm.core.decoding.generation import Prompt
from braidlm.inspection.layers import find_layers
from braidlm.inspection.routes import routes
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.inspection.path_models import saved
from tests.inspection.routed_path_models import by_hand

NAMES = ("stages.0.layers.1.router", "stages.0.layers.1.block.feed.router")


@pytest.fixture(scope="module", params=[1, 2], ids=["one expert a token", "two experts a token"])
def model(request: pytest.FixtureRequest) -> BraidForCausalLM:
    """Letters enter the second block, everything else passes by; its experts are all alike."""
    experts = {"names": 3, "router": {"top_k": request.param}}
    model = by_hand(stages=[{"mixture_of_depths": {"attention": {"heads": 4}, "feed": {"experts": experts}}}])
    with torch.no_grad():
        # Only the second block has a router for its depth; the experts of the first are not looked at.
        router = model.model.stages[0].layers[1].router
        for parameter in router.parameters():
            parameter.zero_()
        router.inner.weight[0, 0] = 4.0
        router.scores.weight[0, 0] = 1.0
        router.scores.bias.copy_(torch.tensor([-1.0, 0.0]))
    return model


def test_the_layers_have_short_labels(model: BraidForCausalLM) -> None:
    layers = {layer.name: layer for layer in find_layers(model)}
    assert layers[NAMES[0]].choices == ("block", "around")
    labels = {name: layer.label for name, layer in layers.items()}
    assert labels[NAMES[1]] == f"{labels[NAMES[0]]} feed"


def test_tokens_that_pass_by_are_counted_and_choose_nothing_inside(model: BraidForCausalLM, tmp_path: Path) -> None:
    out = tmp_path / "report"
    found = routes(saved(model, tmp_path / "m"), [Prompt("ab1.")], out=out).models[0]
    tallies = {tally.layer: tally for tally in found.tallies[-1].read}
    assert tallies[NAMES[0]].shares == {"block": 0.5, "around": 0.5}
    assert (tallies[NAMES[0]].decisions, tallies[NAMES[1]].decisions) == (4, 2)
    views = dict(zip([layer.name for layer in found.layers], found.prompts[0].view.chosen, strict=True))
    assert views[NAMES[0]] == ["block", "block", "around", "around"]
    assert views[NAMES[1]][2:] == ["none", "none"]
    assert "none" not in views[NAMES[1]][:2]
    assert found.prompts[0].chosen[-1] is None
    rows = [row for row in csv.DictReader((out / "tokens.csv").open()) if row["layer"] == NAMES[1]]
    assert [row["position"] for row in rows] == ["0", "1"]
    assert "grey" in (out / "routes.html").read_text()
