"""What is made of the choices: PaPaformer's own table, counted again; domains, findings, sentences."""

from pathlib import Path

import numpy as np
import pytest

import braidlm
from braidlm.core.decoding.generation import Prompt
from braidlm.core.errors import BraidError
from braidlm.inspection import measures
from braidlm.inspection.layers import Layer, TokenChoices
from braidlm.inspection.measures import Tally, tally
from braidlm.inspection.results import ModelRoutes, RoutingReport, degenerate, percent, verdicts
from braidlm.inspection.routes import routes
from braidlm.inspection.texts import Text
from tests.inspection.path_models import always, path_model, saved

TABLE_6 = {
    "gumbel_1": "221 222 221 222 221 211 212 212 111 211 112 111 111 112 122 112 122 132 211 222",
    "gumbel_2": "223 222 112 223 222 211 222 212 122 212 122 221 212 222 221 223 222 311 221 222",
    "linear": "21 11 11 11 21 12 21 11 21 12 21 11 11 22 12 21 11 11 11 21",
}
"""PaPaformer's Table 6: the choice of each of 20 prompts in each layer; ten are stories (1), the others maths (2)."""


def top_1(choices: list[list[int]]) -> TokenChoices:
    """One choice for each layer and token."""
    choices_LT = np.array(choices)
    return TokenChoices(choices_LT[:, None], (choices_LT[:, None] >= 0).astype(np.float32))


def paper_tally(name: str) -> Tally:
    rows = TABLE_6[name].split()
    names = ("stories", "maths", "combined")[: 2 if name == "linear" else 3]
    layers = [Layer(f"stages.2.layers.{n}.join", f"layer {n + 1}", names, "router") for n in range(len(rows[0]))]
    texts = [Text(str(n), "stories" if n < 10 else "maths", [0]) for n in range(20)]
    chosen = [top_1([[int(choice) - 1] for choice in row]) for row in rows]
    return tally("the last token of each prompt", layers, texts, chosen, {"stories": "stories", "maths": "maths"})


@pytest.mark.parametrize(
    ("name", "shares", "accuracy"),
    [("gumbel_1", (48, 50, 2), 40), ("gumbel_2", (23, 70, 7), 46.5), ("linear", (70, 30), 50)],
)
def test_the_papers_table_counted_again(name: str, shares: tuple[int, ...], accuracy: float) -> None:
    found = paper_tally(name)
    assert [100 * share for share in found.shares.values()] == pytest.approx(shares, abs=1.7)
    assert 100 * found.accuracy == pytest.approx(accuracy, abs=0.2)
    assert found.decisions == 20 * len(found.layers)


def test_what_the_papers_table_does_not_say() -> None:
    """Its accuracies are those of choosing without a look at the prompt."""
    for name, chance in (("gumbel_1", 0.49), ("gumbel_2", 0.46), ("linear", 0.5)):
        assert paper_tally(name).accuracy_by_chance == pytest.approx(chance, abs=0.01)
    model = ModelRoutes("m", "m", ["stories", "maths"], [], {}, [], tallies=[paper_tally("linear")])
    assert "50% of 40 decisions are for the path of the text's domain (50% by chance)" in verdicts(model)[0]
    assert "which so few texts may give by chance" in verdicts(model)[0]


def test_a_layer_by_hand() -> None:
    layer = Layer("j", "layer 1", ("a", "b", "combined"), "router")
    texts = [Text("1", "a", [0] * 4), Text("2", "b", [0] * 4), Text("3", None, [0] * 2)]
    chosen = [top_1([[0, 0, 0, 2]]), top_1([[1, 1, 0, 0]]), top_1([[2, 2]])]
    one = tally("all", [layer], texts, chosen, {"a": "a", "b": "b"}).read[0]
    assert one.shares == {"a": 0.5, "b": 0.2, "combined": 0.3}
    assert one.by_domain["a"] == {"a": 0.75, "b": 0.0, "combined": 0.25}
    assert one.by_domain["no domain"] == {"a": 0.0, "b": 0.0, "combined": 1.0}
    assert (one.decisions, one.judged) == (10, 8)
    assert one.accuracy == 5 / 8
    assert one.accuracy_by_chance == pytest.approx(0.5 * 5 / 8 + 0.5 * 2 / 8)
    assert one.information == pytest.approx(measures.mutual_information(np.array([[3, 0, 1], [2, 2, 0]])))
    assert one.domain_entropy == 1.0


def test_accuracy_is_over_the_decisions_that_can_be_right() -> None:
    """Two stages with paths of their own: a domain is judged only where its path stands."""
    layers = [Layer("j", "1", ("a", "b"), "router"), Layer("k", "2", ("a", "c"), "router")]
    texts = [Text("1", "a", [0]), Text("2", "b", [0])]
    chosen = [top_1([[0], [1]]), top_1([[1], [0]])]
    found = tally("all", layers, texts, chosen, {"a": "a", "b": "b"})
    assert [one.judged for one in found.read] == [2, 1]
    assert found.accuracy == pytest.approx(2 / 3)


def test_one_domain_or_none_has_no_information() -> None:
    layer = Layer("j", "layer 1", ("a", "b"), "router")
    for domain in (None, "a"):
        found = tally("all", [layer], [Text("1", domain, [0])], [top_1([[0]])], {"a": "a"})
        assert found.most_informative is None
        assert found.read[0].information is None
        assert found.accuracy == (None if domain is None else 1.0)


LAYER = Layer("stages.2.layers.0.join", "layer 1", ("stories", "maths", "combined"), "router")


def test_degenerate_routers_are_named() -> None:
    active = ["stories", "maths"]
    assert degenerate(LAYER, {"stories": 1.0, "maths": 0.0, "combined": 0.0}, active, active) == [
        "layer 1 sends 100% of tokens to 'stories'"
    ]
    assert degenerate(LAYER, {"stories": 0.0, "maths": 0.004, "combined": 0.996}, active, active) == [
        "layer 1 sends 99.6% of tokens to 'combined'"
    ]
    assert degenerate(LAYER, {"stories": 0.6, "maths": 0.0, "combined": 0.4}, active, active) == [
        "layer 1 never takes 'maths'"
    ]
    assert degenerate(LAYER, {"stories": 1.0, "maths": 0.0, "combined": 0.0}, active, ["stories"]) == [
        "layer 1 sends 100% of tokens to 'stories' (and all texts are 'stories')"
    ]
    assert not degenerate(LAYER, {"stories": 0.6, "maths": 0.3, "combined": 0.1}, active, active)
    assert not degenerate(LAYER, {"stories": 0.6, "maths": 0.0, "combined": 0.4}, ["stories"], active)
    cosine = Layer("j", "layer 1", ("stories", "maths"), "cosine")
    assert degenerate(cosine, {"stories": 1.0, "maths": 0.0}, active, active) == [
        "layer 1 is closest to 'stories' at 100% of tokens"
    ]
    assert not degenerate(cosine, {"stories": 1.0, "maths": 0.0}, ["stories"], active)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1.0, "100%"), (0.4834, "48%"), (0.9996, "99.9%"), (0.0001, "0.1%"), (0.996, "99.6%"), (None, "-")],
)
def test_percent_never_says_all_of_what_is_not(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_routes_of_a_model_that_knows_letters_from_digits(folders: dict[str, Path]) -> None:
    prompts = [Prompt("abc", "stories"), Prompt("x", "stories"), Prompt("12", "maths"), Prompt("a3", "maths")]
    model = routes(folders["letters"], prompts).models[0]
    assert model.name == "letters"
    assert [prompt.chosen for prompt in model.prompts] == [["stories"] * 2] * 2 + [["maths"] * 2] * 2
    assert [prompt.path for prompt in model.prompts] == ["stories", "stories", "maths", "maths"]
    last, everything = model.tallies
    assert (last.accuracy, everything.accuracy) == (1.0, pytest.approx(7 / 8))
    assert last.most_informative is not None
    assert last.most_informative.information == pytest.approx(1.0)
    assert model.prompts[3].shares[0] == {"stories": 0.5, "maths": 0.5, "combined": 0.0}
    assert model.prompts[3].view.tokens == ["a", "3"]
    assert model.prompts[3].view.chosen == [["stories", "maths"]] * 2
    assert model.findings == []


def test_enough_texts_make_it_more_than_chance(folders: dict[str, Path]) -> None:
    prompts = [Prompt("abc"[: 1 + n % 3], "stories") for n in range(6)] + [Prompt(str(n), "maths") for n in range(6)]
    model = routes(folders["letters"], prompts).models[0]
    assert "tells most, 1.00 of the 1.00 bits" in verdicts(model)[0]
    assert verdicts(model)[0].endswith("so the path says much about what a text is.")


def test_the_default_prompts_and_a_stuck_router(folders: dict[str, Path]) -> None:
    model = routes(folders["stuck"]).models[0]
    assert len(model.prompts) == 20
    assert model.tallies[0].shares == {"stories": 0.5, "maths": 0.0, "combined": 0.5}
    assert model.tallies[0].accuracy == 0.25
    assert model.findings == [
        "layer 2 sends 100% of tokens to 'stories'",
        "layer 3 sends 100% of tokens to 'combined'",
    ]
    assert "every layer does the same with every token" in verdicts(model)[0]


def test_inserted_modules_stand_behind_all_that_were_there() -> None:
    attention = Layer("layers.0.attention", "layer 1 attention", ("expert_1", "new_1"), "router", of_paths=False)
    feed = Layer("layers.0.feed", "layer 1 feed", ("expert_1", "expert_2", "new_1"), "router", of_paths=False)
    report = RoutingReport([ModelRoutes("grown", "grown", [], [], {}, [attention, feed])])
    assert report.choices == ["expert_1", "expert_2", "new_1"]


def test_several_models_and_their_names(folders: dict[str, Path]) -> None:
    report = routes([folders["letters"], folders["stuck"]], [Prompt("a", "stories")])
    assert [model.name for model in report.models] == ["letters", "stuck"]
    assert (report.choices, report.no_paths) == (["stories", "maths", "combined"], ["combined"])
    named = routes({"before": folders["letters"], "after": folders["letters"]}, [Prompt("a")])
    assert [model.name for model in named.models] == ["before", "after"]
    with pytest.raises(BraidError, match="this model is given twice"):
        routes([folders["letters"], folders["letters"]])


def test_names_take_as_much_of_a_path_as_tells_them_apart(tmp_path: Path) -> None:
    model = always(path_model("gumbel_v1", layers=1), "maths")
    folders = [saved(model, tmp_path / name) for name in ("x/m", "y/m", "run/checkpoints/step-1", "z")]
    report = routes(folders, [Prompt("a")])
    assert [found.name for found in report.models] == ["x/m", "y/m", "run/step-1", "z"]


def test_paths_can_be_switched_off(folders: dict[str, Path]) -> None:
    model = routes(folders["letters"], [Prompt("ab"), Prompt("12")], paths=["maths"]).models[0]
    assert model.active == ["maths"]
    assert {choice for prompt in model.prompts for choice in prompt.chosen} <= {"maths", "combined"}
    assert "inactive: stories" in model.notes
    with pytest.raises(BraidError, match=r"the model has no path 'story'. Did you mean 'stories'\?"):
        routes(folders["letters"], paths=["story"])


def test_a_path_switched_off_in_the_folder_stays_off(tmp_path: Path) -> None:
    model = path_model("gumbel_v2")
    model.config.paths = ["maths"]
    assert routes(saved(model, tmp_path / "m"), [Prompt("ab")]).models[0].active == ["maths"]


def test_the_verb_is_a_function_also_when_its_package_has_been_imported(folders: dict[str, Path]) -> None:
    assert braidlm.routes is routes
    report = braidlm.routes(folders["letters"], prompts=["a", "1"])
    assert [prompt.chosen[0] for prompt in report.models[0].prompts] == ["stories", "maths"]


def test_a_notebook_shows_the_models() -> None:
    model = ModelRoutes("moep", "runs/moep", ["a"], ["a"], {}, [], findings=["layer 1 never takes 'a'"])
    html = RoutingReport([model])._repr_html_()
    assert '<th scope="col">moep</th>' in html
    assert "layer 1 never takes" in html


def test_domains_of_other_names(folders: dict[str, Path]) -> None:
    prompts = [Prompt("a", "tales"), Prompt("1", "2"), Prompt("?", "rest")]
    model = routes(folders["letters"], prompts, domains={"tales": "stories", "rest": ""}).models[0]
    assert model.domains == {"tales": "stories", "2": "maths", "rest": None}
    assert [prompt.path for prompt in model.prompts] == ["stories", "maths", None]
    assert [prompt.chosen for prompt in model.prompts[:2]] == [["stories"] * 2, ["maths"] * 2]
    assert model.tallies[0].accuracy == 1.0
    none = routes(folders["random"], [Prompt("a", "tales"), Prompt("1", "sums")]).models[0]
    assert none.tallies[0].accuracy is None
    assert none.tallies[0].most_informative is not None
    assert any("`--domains tales=a sums=b` would say so" in note for note in none.notes)


def test_a_prompt_longer_than_the_context(folders: dict[str, Path]) -> None:
    with pytest.raises(BraidError, match=r"letters: the prompt 'x+' has 65 tokens, and the model's context is 64"):
        routes(folders["letters"], [Prompt("x" * 65)])
    with pytest.raises(BraidError, match="there is nothing to look at"):
        routes(folders["letters"], [])


@pytest.mark.parametrize(
    "mistake",
    [
        {"prompts": "nowhere.jsonl"},
        {"prompts": [Prompt("a", "storys")]},
        {"data": {"stories": "nowhere.txt"}},
        {"paths": ["story"]},
        {"domains": {"stories": "poems"}},
        {"out": "."},
        {"device": "toaster"},
        {"prompts": [Prompt("x" * 65)]},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_mistakes_are_found_before_a_model_is_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, mistake: dict
) -> None:
    monkeypatch.setattr("braidlm.opening.braid.load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(BraidError):
        routes(folders["letters"], **mistake)
