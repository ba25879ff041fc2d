"""Modules that are switched off by name: they add nothing, the others take their weight, and nothing is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.core.reading import read_json
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import switch_off_modules, use_paths
from braidlm.model.routing.router import TopKRouter
from tests.tiny_models import random_ids, tiny_model
from tests.without_braid import run_without_braid

NAMES = ["old_1", "old_2", "german_1", "german_2"]


def modules_model(renormalise: bool = True, top_k: int = 2, keys: str = "shared", **router: Any) -> BraidForCausalLM:
    """Two blocks of attention modules and feed-forward modules."""
    router |= {"top_k": top_k, "renormalise": renormalise}
    attention = {"heads": 2, "experts": {"names": NAMES, "keys": keys, "router": router}}
    feed = {"kind": "mlp", "hidden": 12, "experts": {"names": [*NAMES, "extra"], "router": router}}
    return tiny_model(stages=[{"block": {"layers": 2, "attention": attention, "feed": feed}}])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, 7), use_cache=False).logits


def inactive(model: torch.nn.Module) -> dict[str, set[str]]:
    """By the part that it belongs to, what each router does not choose."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return {router.address.removesuffix(".router"): set(router.inactive) for router in routers if router.inactive}


@pytest.mark.parametrize("compute", ["sparse", "dense"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("keys", ["own", "shared"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_nothing_of_a_module_is_left(keys: str, renormalise: bool, compute: str, top_k: int) -> None:
    model = modules_model(renormalise, top_k, keys, compute=compute)
    whole = logits(model)
    model.switch_off("german*", "extra")
    before = logits(model)
    assert not torch.allclose(before, whole)
    for name, parameter in model.named_parameters():
        if any(bank in name for bank in (".bank.", ".queries.", "attention.out.", "router.scores.")):
            parameter.data[2:] += 1.0
    torch.testing.assert_close(logits(model), before)
    model.switch_off()
    assert not torch.allclose(logits(model), before)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("options", [{}, {"noise": 1.0}, {"sampled": 1}, {"balance_rate": 0.1}], ids=str)
def test_the_others_take_the_weight_in_proportion(renormalise: bool, options: dict[str, Any]) -> None:
    model = modules_model(renormalise, **options)
    router = model.model.stages[0].layers[0].attention.router
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    before = router(hidden).probabilities_BTN
    model.switch_off("german*")
    for training in (False, True):
        routing = router.train(training)(hidden)
        assert (routing.chosen_BTK < 2).all()
        expected = before[..., :2] / before[..., :2].sum(-1, keepdim=True)
        torch.testing.assert_close(routing.probabilities_BTN[..., :2], expected)
        torch.testing.assert_close(routing.weights_BTK.sum(-1), torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("sampled", [None, 0, 1, 2, 3])
def test_where_fewer_are_left_than_a_token_takes_it_takes_those(sampled: int | None) -> None:
    """In evaluation, and in training whether the others are drawn or ranked."""
    model = modules_model(renormalise=False, top_k=3, sampled=sampled or 0).train(sampled is not None)
    model.switch_off("old_2", "german*", "extra")
    for routing in model(random_ids(2, 7)).routings:
        assert all(len(set(chosen)) == 3 for chosen in routing.chosen_BTK.flatten(0, 1).tolist())
        weights = torch.zeros(len(routing.choices), dtype=routing.weights_BTK.dtype)
        weights[0] = 1.0
        torch.testing.assert_close(routing.weights_BTN, weights.expand(2, 7, -1))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {}),
        (["extra"], {f"stages.0.layers.{n}.feed": {"extra"} for n in (0, 1)}),
        (["stages.0.layers.1.feed:old_1"], {"stages.0.layers.1.feed": {"old_1"}}),
        (["model.stages.0.layers.1.feed.router:old_1"], {"stages.0.layers.1.feed": {"old_1"}}),
        (["stages.0.layers.1:old_1"], {f"stages.0.layers.1.{part}": {"old_1"} for part in ("attention", "feed")}),
        (
            ["*.attention:german*", "stages.0.layers.0.attention:old_1"],
            {
                "stages.0.layers.0.attention": {"old_1", "german_1", "german_2"},
                "stages.0.layers.1.attention": {"german_1", "german_2"},
            },
        ),
    ],
    ids=["none", "a name", "in a layer's part", "in a router", "in a layer", "a pattern, and a name in a layer's part"],
)
def test_names_patterns_and_parts(names: list[str], expected: dict[str, set[str]]) -> None:
    model = modules_model()
    model.switch_off("old_2")  # the next call begins anew
    model.switch_off(*names)
    assert inactive(model) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("germn_1", "the model has no module 'germn_1'. Did you mean 'german_1'?"),
        ("z*", "the model has no module 'z*'. There are: extra, german_1, german_2, old_1, old_2."),
        (
            "*.attention:extra",
            "*.attention: the model has no module 'extra'. There are: german_1, german_2, old_1, old_2.",
        ),
        (
            "stages.0.layers.7.feed:old_1",
            "stages.0.layers.7.feed:old_1: the model has no part 'stages.0.layers.7.feed' with modules. "
            "Did you mean 'stages.0.layers.1.feed'?",
        ),
        ("*_*", "stages.0.layers.0.attention: this switches off every module there\nLeave at least one of them."),
    ],
)
def test_modules_that_cannot_be_switched_off(name: str, text: str) -> None:
    model = modules_model()
    model.switch_off("extra")
    before = inactive(model)
    with pytest.raises(BraidError) as caught:
        model.switch_off("old_1", name)
    assert str(caught.value) == text
    assert inactive(model) == before


def test_a_model_without_modules_has_none_to_switch_off() -> None:
    with pytest.raises(BraidError, match="this model has no modules"):
        switch_off_modules(tiny_model(), ["expert_1"])
    with pytest.raises(BraidError, match=r"no modules \(experts\)\nIts paths are a, b: `--paths` names those to use"):
        switch_off_modules(tiny_model(stages=[{"parallel": {"paths": ["a", "b"], "join": "routed"}}]), ["a"])


@pytest.mark.parametrize("per", ["block", "sublayer"])
def test_paths_and_modules_are_switched_apart(per: str) -> None:
    """Also where a module has the name of a path."""
    experts = {"feed": {"kind": "mlp", "hidden": 8, "experts": {"names": ["a", "b", "c"]}}}
    paths = {"parallel": {"paths": ["a", "b", "c"], "join": {"kind": "routed", "per": per}}}
    model = tiny_model(stages=[{"block": experts}, paths])
    use_paths(model, ["a", "b"])
    model.switch_off("a")
    assert inactive(model).pop("stages.0.layers.0.feed") == {"a"}
    of_paths = {name: names for name, names in inactive(model).items() if name.startswith("stages.1.")}
    assert of_paths
    assert all(names == {"c"} for names in of_paths.values())
    use_paths(model, None)
    assert inactive(model) == {"stages.0.layers.0.feed": {"a"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(modules_model().float(), tmp_path / "m", None, {"made_by": "a test"})


def test_loading_without_modules_and_saving_with_all(folder: Path, tmp_path: Path) -> None:
    expected_model = load_model(folder)
    expected_model.switch_off("german*")
    expected = logits(expected_model)
    for loaded in (
        load_model(folder, without=["german*"]),
        BraidForCausalLM.from_pretrained(folder, without=["german*"]).eval(),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, without=["german*"]).eval(),
    ):
        assert torch.equal(logits(loaded), expected)
    again = save_model(load_model(folder, without=["german*"]), tmp_path / "again", None, {"made_by": "a test"})
    assert "without" not in read_json(again / "config.json")
    assert torch.equal(logits(load_model(again)), logits(load_model(folder)))


def test_loading_without_a_module_that_is_not_there(folder: Path) -> None:
    with pytest.raises(BraidError) as caught:
        load_model(folder, without=["germn_1"])
    assert str(caught.value) == f"{folder}: the model has no module 'germn_1'. Did you mean 'german_1'?"


def test_a_folder_switches_modules_off_where_braid_is_not_installed(folder: Path) -> None:
    script = f"""
from transformers import AutoModelForCausalLM
import torch
load = lambda **options: AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True, **options).eval()
ids = torch.arange(1, 8)[None]
one, other = load(without=["german*"]), load()
assert not torch.equal(one(ids).logits, other(ids).logits)
other.switch_off("german*")
assert torch.equal(one(ids).logits, other(ids).logits)
cached = one.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
assert torch.equal(cached, one.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False))
"""
    run_without_braid(script)
