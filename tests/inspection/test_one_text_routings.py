"""Token by token: the choices of `braid routes`, the shares of an average's members, and what gates add."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.decoding.generation import Prompt
from braidlm.inspection.gates import measure_gates
from braidlm.inspection.one_text import token_routings
from braidlm.inspection.routes import routes
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import use_paths
from tests.inspection.path_models import PATHS, TOKENIZER, by_character, passing, path_model, saved
from tests.inspection.routed_path_models import expert_model, routed_model, routers_by_character
from tests.tiny_models import tiny_model

TEXT = "ab 12, c: 7"
IDS = TOKENIZER.encode(TEXT)


def averaged(head: dict[str, Any]) -> BraidForCausalLM:
    parts = [{"name": name, "width": 8} for name in PATHS]
    return tiny_model(
        vocab_size=TOKENIZER.vocab_size,
        stages=[{"parallel": {"layers": 2, "paths": parts, "join": "concat"}}],
        norm={"kind": "per_path", "paths": parts},
        head={**head, "paths": parts},
        tie_embeddings=False,
        context=64,
    )


def with_depths() -> BraidForCausalLM:
    stage = {"mixture_of_depths": {"attention": {"heads": 4}, "feed": {"experts": {"names": 3}}}}
    return tiny_model(vocab_size=TOKENIZER.vocab_size, stages=[stage], context=64)


def gated_model() -> BraidForCausalLM:
    model = tiny_model(
        vocab_size=TOKENIZER.vocab_size, stages=[{"block": {"layers": 3}}], gates={"kind": "scalar"}, context=64
    )
    with torch.no_grad():
        model.model.stages[0].layers[1].gate.weight.fill_(0.0)
    return model


MODELS: dict[str, Any] = {
    "gumbel": lambda: by_character(path_model("gumbel_v2")),
    "cosine": lambda: passing(path_model("shared_linear", layers=2), "maths", "stories"),
    "routed": lambda: routers_by_character(routed_model()),
    "experts": expert_model,
    "depths": with_depths,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_token_chooses_what_braid_routes_reports(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    reported = routes(saved(model, tmp_path / "m"), [Prompt(TEXT)]).models[0]
    view = reported.prompts[0].view
    found = token_routings(model, IDS)
    assert [layer.name for layer in found] == [layer.name for layer in reported.layers]
    for layer, served in zip(found, view.served, strict=True):
        assert served is not None
        ours = [
            {layer.choices[n]: weights[n] for n in chosen}
            for weights, chosen in zip(layer.weights, layer.chosen, strict=True)
        ]
        assert [list(by) for by in ours] == [list(by) for by in served]
        for own, theirs in zip(ours, served, strict=True):
            assert own == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gumbel", {"paths"}),
        ("routed", {"paths"}),
        ("experts", {"experts", "attention experts", "projection experts"}),
        ("depths", {"depth", "experts"}),
    ],
)
def test_kinds_of_choices(name: str, kinds: set[str]) -> None:
    assert {layer.kind for layer in token_routings(MODELS[name](), IDS)} == kinds


@pytest.mark.parametrize("head", [{"kind": "posterior"}, {"kind": "mixture", "per_token": True}])
def test_the_shares_of_members_that_are_weighed_anew(head: dict[str, Any], tmp_path: Path) -> None:
    model = averaged(head)
    (layer,) = token_routings(model, IDS)
    assert (layer.kind, layer.choices) == ("members", list(PATHS))
    assert [sum(row) for row in layer.weights] == pytest.approx([1.0] * len(IDS), abs=2e-4)
    assert len({tuple(row) for row in layer.weights}) > 2
    view = routes(saved(model, tmp_path / "m"), [Prompt(TEXT)]).models[0].prompts[0].view
    assert [layer.choices[chosen] for (chosen,) in layer.chosen] == view.chosen[0]
    use_paths(model, ["maths"])
    (alone,) = token_routings(model, IDS)
    assert alone.weights == [[0.0, 1.0]] * len(IDS)


def test_the_shares_of_a_plain_average_are_its_own() -> None:
    (layer,) = [one for one in token_routings(averaged({"kind": "average"}), IDS) if one.kind == "members"]
    assert layer.weights == [[0.5, 0.5]] * len(IDS)
    assert layer.chosen == [[0, 1]] * len(IDS)


def test_what_gates_add() -> None:
    model = gated_model()
    layers = token_routings(model, IDS)
    activities = measure_gates(model, [IDS], [None])
    assert [layer.label for layer in layers] == ["layer 2", "layer 3"]
    for layer, activity in zip(layers, activities, strict=True):
        assert sum(row[0] for row in layer.weights) / len(IDS) == pytest.approx(activity.relative, abs=1e-4)
    assert layers[0].chosen == [[]] * len(IDS), "this gate is zero"
    assert layers[1].chosen == [[0]] * len(IDS)


def test_a_dense_model_chooses_nothing() -> None:
    assert token_routings(tiny_model(vocab_size=TOKENIZER.vocab_size), IDS) == []


def test_a_text_longer_than_the_context_is_read_in_windows() -> None:
    model = averaged({"kind": "posterior"})
    (layer,) = token_routings(model, IDS * 8)
    assert len(layer.weights) == len(layer.chosen) == len(IDS) * 8
