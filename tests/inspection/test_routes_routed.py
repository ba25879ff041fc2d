"""Who goes where in models that route by top-k: routed joins, experts on projections and in blocks."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.decoding.generation import Prompt
from braidlm.inspection.layers import NO_CHOICE, Layer, collect_choices, find_layers
from braidlm.inspection.results import degenerate, load_chart
from braidlm.inspection.routes import routes
from braidlm.inspection.texts import Text
from braidlm.model.paths.switches import use_paths
from tests.inspection.path_models import TOKENIZER, saved
from tests.inspection.routed_path_models import FOUR, expert_model, routed_model, routers, routers_by_character
from tests.tiny_models import tiny_model

EXPERTS = ["expert_1", "expert_2", "expert_3", "expert_4"]


def texts(*given: str) -> list[Text]:
    return [Text(text, None, TOKENIZER.encode(text)) for text in given]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routed paths that know letters from digits."""
    return saved(routers_by_character(routed_model()), tmp_path_factory.mktemp("routed") / "routed")


def test_the_layers_of_a_routed_join() -> None:
    first, second = find_layers(routed_model())
    assert (first.name, second.name) == ("stages.1.layers.0.join.router", "stages.1.layers.1.join.router")
    assert (first.label, second.label) == ("layer 2", "layer 3")
    assert (list(first.choices), first.read_by, first.top_k, first.of_paths) == (FOUR, "router", 2, True)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_picks_and_weights(stacked: bool, compute: str) -> None:
    model = routers_by_character(routed_model(stacked=stacked, join={"compute": compute}))
    (choices,) = collect_choices(model, find_layers(model), texts("a1."))
    assert choices.main_LT.tolist() == [[0, 1, 2]] * 2
    assert choices.chosen_LKT.tolist() == [[[0, 1, 2], [1, 0, 0]]] * 2
    assert choices.weights_LKT[:, 0] == pytest.approx(0.75, abs=1e-4)
    assert choices.weights_LKT[:, 1] == pytest.approx(0.25, abs=1e-4)


def test_weights_that_do_not_add_up_to_one_are_shares_all_the_same(tmp_path: Path) -> None:
    model = routed_model(join={"renormalise": False})
    with torch.no_grad():
        for router in routers(model):
            router.scores.weight.zero_()
            router.scores.bias.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    one = routes(saved(model, tmp_path / "m"), [Prompt("a")]).models[0].tallies[-1].read[0]
    assert one.load == {"stories": 0.5, "maths": 0.5, "signs": 0.0, "spare": 0.0}
    assert one.weight["stories"] == pytest.approx(4 / 7)


def test_load_weight_and_the_one_that_counts_most(folder: Path) -> None:
    found = routes(folder, [Prompt("ab", "stories"), Prompt("1.", "maths")]).models[0]
    assert (found.paths, found.active) == (FOUR, FOUR)
    last, everything = found.tallies
    assert (last.accuracy, everything.accuracy) == (0.5, 0.75)
    one = everything.read[0]
    assert one.shares == {"stories": 0.5, "maths": 0.25, "signs": 0.25, "spare": 0.0}
    assert one.load == {"stories": 0.5, "maths": 0.375, "signs": 0.125, "spare": 0.0}
    assert one.weight == pytest.approx({"stories": 0.5, "maths": 0.3125, "signs": 0.1875, "spare": 0.0}, abs=1e-4)
    assert one.load_by_domain["stories"] == {"stories": 0.5, "maths": 0.5, "signs": 0.0, "spare": 0.0}
    assert one.weight_by_domain["stories"]["stories"] == pytest.approx(0.75, abs=1e-4)
    assert one.entropy == pytest.approx(1.4056, abs=1e-3)  # of the load
    assert found.findings == [f"layer {n} never takes 'spare'" for n in (2, 3)]
    view = found.prompts[1].view
    assert view.chosen == [["maths", "signs"]] * 2
    assert list(view.served[0][1]) == ["signs", "stories"]


def test_an_inactive_path_is_never_picked() -> None:
    model = routers_by_character(routed_model())
    use_paths(model, ["maths", "signs"])
    (choices,) = collect_choices(model, find_layers(model), texts("ab 12"))
    assert set(choices.chosen_LKT.flatten().tolist()) == {1, 2}
    use_paths(model, ["signs"])  # fewer than top_k
    (choices,) = collect_choices(model, find_layers(model), texts("ab"))
    assert choices.main_LT.tolist() == [[2, 2]] * 2
    assert set(choices.chosen_LKT[:, 1].flatten().tolist()) == {NO_CHOICE}


def test_paths_chosen_per_sublayer() -> None:
    layers = find_layers(routed_model(join={"per": "sublayer"}))
    assert [layer.label for layer in layers] == [
        "layer 2 attention",
        "layer 2 feed",
        "layer 3 attention",
        "layer 3 feed",
    ]
    assert layers[0].name == "stages.1.layers.0.attention.router"
    assert all(layer.of_paths and list(layer.choices) == FOUR for layer in layers)


def test_experts_in_paths_of_their_own() -> None:
    bank = {"kind": "swiglu", "hidden": 24, "experts": 3}
    layers = find_layers(routed_model(feed=bank))
    assert [(layer.label, layer.of_paths) for layer in layers[:5]] == [
        ("layer 2 stories feed", False),
        ("layer 2 maths feed", False),
        ("layer 2 signs feed", False),
        ("layer 2 spare feed", False),
        ("layer 2", True),
    ]
    assert len({layer.label for layer in layers}) == len(layers)


def test_layers_that_choose_nothing_count_too() -> None:
    feed = {"hidden": 16, "experts": {"names": 3, "router": {"top_k": 1}}}
    stages = [{"block": {"layers": 2}}, {"block": {"layers": 2, "feed": feed}}]
    assert [layer.label for layer in find_layers(tiny_model(stages=stages))] == ["layer 3 feed", "layer 4 feed"]


def test_a_model_of_experts_without_paths(tmp_path: Path) -> None:
    prompts = [Prompt("ab", "stories"), Prompt("12", "maths")]
    found = routes(saved(expert_model(), tmp_path / "m"), prompts).models[0]
    assert [layer.label for layer in found.layers] == [
        "layer 1 attention",
        "layer 1 feed",
        "projection 1",
        "layer 2 attention",
        "layer 2 feed",
    ]
    assert found.layers[2].name == "stages.1.experts.router"
    assert (found.paths, found.domains, found.notes) == ([], {"stories": None, "maths": None}, [])
    tally = found.tallies[-1]
    assert (tally.shares, tally.accuracy, tally.decisions) == ({}, None, 4 * 5)
    for one in tally.read:
        assert list(one.load) == EXPERTS
        assert sum(one.load.values()) == pytest.approx(1.0)
        assert sum(one.weight.values()) == pytest.approx(1.0)
        assert one.information is not None


def test_the_page_and_the_tables(folder: Path, routes_verb: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "ab", "domain": "stories"}\n{"prompt": "1.", "domain": "maths"}\n')
    shown = routes_verb(folder, "--prompts", prompts, "--out", tmp_path / "report", "--quiet")
    assert (shown.code, shown.err) == (0, "")
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "layer 2 50% 38% 12% 0% 1.41 75% 1.00 of 1.00" in lines
    page = (tmp_path / "report" / "routes.html").read_text()
    assert "Routers choose for each token a few of several paths or experts." in page
    assert "its router, top 2" in page
    for cell in ("2 of 4", "25%", "stories", "spare", "0%"):
        assert f">{cell}</td>" in page
    with open(tmp_path / "report" / "shares.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["counted"] == "all tokens of the prompts"]
    (row,) = [r for r in rows if (r["layer"][-13:], r["domain"], r["choice"]) == ("0.join.router", "maths", "signs")]
    assert (float(row["share"]), float(row["load"])) == (0.5, 0.25)
    assert float(row["weight"]) == pytest.approx(0.375, abs=1e-4)
    with open(tmp_path / "report" / "tokens.csv", encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["token"], first["chosen"], first["others"]) == ("a", "stories", "maths 0.25")


def test_many_experts_are_shown_by_their_ends(tmp_path: Path, routes_verb: Any) -> None:
    folder = saved(expert_model(experts=12, top_k=3), tmp_path / "m")
    prompts = tmp_path / "p.txt"
    prompts.write_text("some text, 12\n")
    shown = routes_verb(folder, "--prompts", prompts, "--quiet")
    header = next(" ".join(line.split()) for line in shown.out.splitlines() if "most used" in line)
    assert header == "layer most used least used entropy right bits"


def test_degenerate_top_k() -> None:
    layer = Layer("r", "layer 1", ("a", "b", "c"), "router", top_k=2)
    names = ["a", "b", "c"]
    assert degenerate(layer, {"a": 0.5, "b": 0.495, "c": 0.005}, names, []) == [
        "layer 1 gives 99.5% of its picks to 'a' and 'b'"
    ]
    assert degenerate(layer, {"a": 0.5, "b": 0.3, "c": 0.2}, names, []) == []
    four = Layer("r", "layer 1", ("a", "b", "c", "d"), "router", top_k=2, of_paths=False)
    assert degenerate(four, {"a": 0.4, "b": 0.3, "c": 0.3, "d": 0.0}, [], []) == ["layer 1 never takes 'd'"]
    everything = Layer("r", "layer 1", ("a", "b"), "router", top_k=2)
    assert degenerate(everything, {"a": 0.5, "b": 0.5}, ["a", "b"], []) == []


def test_the_tokens_that_each_choice_is_taken_for(folder: Path) -> None:
    (found,) = routes(folder, [Prompt("aab"), Prompt("112"), Prompt("..")]).models
    for typical in found.typical:
        assert typical is not None
        assert typical["signs"] == ["."]
        assert set(typical["maths"]) == {"a", "b", "1", "2"}
        assert typical["stories"] == typical["spare"] == []  # every token takes the one, and none the other


def test_many_experts_in_many_layers_stay_readable(tmp_path: Path) -> None:
    """Heat maps in place of bars, some layers token by token, and all of it in the tables."""
    bank = {"experts": {"names": 12, "router": {"top_k": 2}}}
    block = {"layers": 10, "feed": {"kind": "mlp", "hidden": 8, **bank}, "attention": {"heads": 2, **bank}}
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=64, stages=[{"block": block}])
    report = routes(saved(model, tmp_path / "m"), [Prompt("ab", "x"), Prompt("12", "y")], out=tmp_path / "report")
    (attention, feed) = load_chart(report).maps
    assert [one.title for one in (*attention, *feed)] == ["attention: x", "attention: y", "feed: x", "feed: y"]
    assert (len(attention[0].rows), len(attention[0].columns)) == (10, 12)
    page = (tmp_path / "report" / "routes.html").read_text()
    assert "Some of the layers are shown" in page
    assert page.count("<dt>layer 1 attention</dt>") == page.count("<dt>layer 10 feed</dt>") == 2
    assert page.count("<dt>layer") == 2 * 6
    with open(tmp_path / "report" / "typical.csv", encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 20 * 12
