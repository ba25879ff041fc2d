"""`/braid/...` over HTTP: what the functions and verbs give, for each request with its own switches."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.decoding.generation import Prompt
from braidlm.edits.compose import compose
from braidlm.inspection.generate import generate
from braidlm.inspection.routes import routes
from braidlm.opening.open import open_model
from braidlm.serving.inspect import router as module
from braidlm.studies.show import folder_facts
from tests.inspection.path_models import PATHS, by_character, path_model, saved
from tests.inspection.routed_path_models import expert_model
from tests.inspection.test_one_text_routings import averaged, gated_model
from tests.serving.engines import save_tiny
from tests.serving.inspect.client import Ask, with_app
from tests.tiny_decoders import save_decoder, save_gates

TEXT = "ab 12, c: 7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of every kind, in one folder."""
    home = tmp_path_factory.mktemp("served")
    made = {
        "letters": by_character(path_model("gumbel_v2")),
        "added": path_model("add"),
        "experts": expert_model(),
        "posterior": averaged({"kind": "posterior"}),
        "gated": gated_model(),
    }
    for name, model in made.items():
        saved(model, home / name)
    save_tiny(home / "toy")
    for name in ("first", "second"):
        save_decoder("llama", home / "toy", home.parent / name, vocab_size=300)
    compose([home.parent / "first", home.parent / "second"], home / "decoders", join="posterior")
    return home


def test_models_and_the_names_of_their_parts(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        await ask("/braid/next", model="gated", prompt="a")
        return (await ask("/braid/models"))["models"]

    models = {model["name"]: model for model in with_app(folder, work)}
    assert set(models) == {"letters", "added", "experts", "posterior", "gated", "toy", "decoders"}
    assert models["letters"]["paths"] == list(PATHS)
    assert [(each["layer"], each["label"]) for each in models["experts"]["modules"]] == [
        ("stages.0.layers.0.attention", "layer 1 attention"),
        ("stages.0.layers.0.feed", "layer 1 feed"),
        ("stages.1.experts", "projection 1"),
        ("stages.2.layers.0.attention", "layer 2 attention"),
        ("stages.2.layers.0.feed", "layer 2 feed"),
    ]
    assert models["letters"]["tokenizer"] == models["added"]["tokenizer"] != models["toy"]["tokenizer"]
    assert models["gated"]["gates"] == ["layer 2", "layer 3"]
    assert models["posterior"]["members"] == list(PATHS)
    assert models["decoders"]["members"] == models["decoders"]["paths"] == ["first", "second"]
    assert [name for name, model in models.items() if model["loaded"]] == ["gated"]
    assert models["gated"]["problem"] is None
    assert models["gated"]["parameters"] == sum(p.numel() for p in open_model(folder / "gated").load().parameters())


def test_facts_are_those_of_braid_show(folder: Path) -> None:
    facts = with_app(folder, lambda ask: ask("/braid/models/letters/facts"))
    wanted = folder_facts(open_model(folder / "letters"))
    assert facts["parameters"] == wanted["parameters"]
    assert facts.keys() == wanted.keys()


def test_the_lineage(folder: Path) -> None:
    graph = with_app(folder, lambda ask: ask("/braid/models/letters/lineage"))
    assert [(node["kind"], node["label"]) for node in graph["nodes"]] == [("model", "letters"), ("edit", "a test")]
    assert graph["edges"] == [{"from": graph["nodes"][1]["id"], "to": graph["nodes"][0]["id"], "label": ""}]


def test_tokens_are_pieces_of_the_text(folder: Path) -> None:
    tokens = with_app(folder, lambda ask: ask("/braid/tokens", model="letters", text="aä<eos>"))["tokens"]
    assert [token["text"] for token in tokens][:3] == ["a", "", "ä"]
    assert "".join(token["text"] for token in tokens) == "aä<eos>"


def test_next_tokens_are_those_of_braid_generate(folder: Path) -> None:
    wanted = generate(folder / "added", TEXT, max_tokens=1, top_next=5, device="cpu").texts[0].next

    async def work(ask: Ask) -> Any:
        ids = [token["id"] for token in (await ask("/braid/tokens", model="added", text="c: 7"))["tokens"]]
        whole = await ask("/braid/next", model="added", prompt=TEXT, top=5)
        parts = await ask("/braid/next", model="added", prompt=TEXT.removesuffix("c: 7"), tokens=ids, top=5)
        off = await ask("/braid/next", model="added", prompt=TEXT, top=5, switches={"paths": ["maths"]})
        return whole, parts, off

    whole, parts, off = with_app(folder, work)
    assert [(t["id"], t["text"]) for t in whole["tokens"]] == [(t.id, t.text) for t in wanted]
    assert [t["probability"] for t in whole["tokens"]] == pytest.approx([t.probability for t in wanted], rel=1e-5)
    assert parts == whole
    assert off != whole
    alone = generate(folder / "added", TEXT, 1, top_next=5, paths=["maths"], device="cpu").texts[0].next
    assert [t["probability"] for t in off["tokens"]] == pytest.approx([t.probability for t in alone], rel=1e-5)


@pytest.mark.parametrize("name", ["letters", "experts"])
def test_routings_are_those_of_braid_routes(folder: Path, name: str) -> None:
    view = routes(folder / name, [Prompt(TEXT)], device="cpu").models[0].prompts[0].view
    answer = with_app(folder, lambda ask: ask("/braid/routings", model=name, text=TEXT))
    assert [token["text"] for token in answer["tokens"]] == view.tokens
    assert len(answer["layers"]) == len(view.served)
    for layer, served in zip(answer["layers"], view.served, strict=True):
        for weights, chosen, theirs in zip(layer["weights"], layer["chosen"], served or (), strict=True):
            assert {layer["choices"][n]: weights[n] for n in chosen} == pytest.approx(theirs, abs=1e-4)


def test_each_request_has_its_own_switches(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        switches = [{}, {"without": ["expert_1"]}, {}]
        asked = [ask("/braid/routings", model="experts", text=TEXT, switches=each) for each in switches]
        gates = [ask("/braid/routings", model="gated", text=TEXT, switches=s) for s in ({}, {"gates_off": ["layer 3"]})]
        return await asyncio.gather(*asked, *gates)

    one, off, again, gates, gates_off = with_app(folder, work)
    assert one == again
    assert all(0 in {n for chosen in layer["chosen"] for n in chosen} for layer in one["layers"][:1])
    assert all(0 not in {n for chosen in layer["chosen"] for n in chosen} for layer in off["layers"])
    assert [layer["chosen"][0] for layer in gates["layers"]] == [[], [0]]
    assert [layer["chosen"][0] for layer in gates_off["layers"]] == [[], []]


def test_members_of_a_posterior(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        alone = {"members": ["maths"]}
        shares = [await ask("/braid/routings", model="posterior", text=TEXT, switches=s) for s in ({}, alone)]
        return [answer["layers"][-1] for answer in shares]

    both, one = with_app(folder, work)
    assert (both["kind"], both["choices"]) == ("members", list(PATHS))
    assert all(0 < share < 1 for share in both["weights"][3])
    assert one["weights"] == [[0.0, 1.0]] * len(one["weights"])


def test_members_that_are_decoders(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        alone = {"members": ["second"]}
        shares = [await ask("/braid/routings", model="decoders", text=TEXT, switches=s) for s in ({}, alone)]
        return [answer["layers"][-1]["weights"][-1] for answer in shares]

    both, one = with_app(folder, work)
    assert all(0 < share < 1 for share in both)
    assert one == [0.0, 1.0]


def test_what_changes(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        gates = await ask("/braid/changes", model="gated", text=TEXT, switches={"gates_off": ["layer 3"]})
        back = await ask("/braid/changes", model="gated", text=TEXT, against={"gates_off": ["layer 3"]})
        models = await ask("/braid/changes", model="gated", other="letters", text=TEXT)
        same = await ask("/braid/changes", model="gated", text=TEXT)
        return gates, back, models, same

    gates, back, models, same = with_app(folder, work)
    assert gates["tokens"][0]["before"] is None
    assert all(token["divergence"] > 0 for token in gates["tokens"][1:])
    assert (gates["bits_before"], gates["bits_after"]) == (back["bits_after"], back["bits_before"])
    assert models["bits_before"] == gates["bits_before"]
    assert models["bits_after"] != gates["bits_after"]
    assert all(token["divergence"] < 1e-6 for token in same["tokens"][1:])


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/braid/next", {"model": "nothing", "prompt": "a"}, 404, "there is no model 'nothing'"),
        ("/braid/next", {"model": "../letters", "prompt": "a"}, 404, "there is no model"),
        ("/braid/next", {"model": "letters", "prompt": "a" * 300_000}, 400, "prompt"),
        ("/braid/next", {"model": "letters", "prompt": "a", "tokens": [10**6]}, 400, "there is no token 1000000"),
        ("/braid/next", {"model": "letters", "prompt": "a", "tokens": [-1]}, 400, "tokens"),
        ("/braid/next", {"model": "letters", "prompt": "a", "top": 0}, 400, "top"),
        ("/braid/next", {"model": "letters", "prompt": "\ud800"}, 400, "valid string"),
        ("/braid/routings", {"model": "letters", "text": "a" * 5000}, 400, "at most 4,096 are looked at"),
        ("/braid/routings", {"model": "letters", "text": 5}, 400, "text"),
        ("/braid/routings", {"model": "letters"}, 400, "text"),
        ("/braid/routings", {"model": "letters", "text": "a", "x": 1}, 400, "unknown or unsupported key 'x'"),
        ("/braid/routings", {"model": "letters", "text": "a", "switches": {"paths": ["math"]}}, 400, "maths"),
        ("/braid/routings", {"model": "gated", "text": "a", "switches": {"gates_off": ["9"]}}, 400, "no gate '9'"),
        ("/braid/changes", {"model": "letters", "other": "toy", "text": "a"}, 400, "different tokenizers"),
    ],
)
def test_errors_have_the_form_of_openai(folder: Path, path: str, body: dict, status: int, said: str) -> None:
    async def work(ask: Ask) -> Any:
        return await ask(path, status, **body)

    error = with_app(folder, work)["error"]
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_an_empty_text(folder: Path) -> None:
    async def work(ask: Ask) -> Any:
        changes = await ask("/braid/changes", model="letters", text="")
        routings = await ask("/braid/routings", model="posterior", text="")
        return changes, routings, await ask("/braid/next", model="letters", prompt="", top=1)

    changes, routings, best = with_app(folder, work)
    assert (len(changes["tokens"]), changes["bits_before"]) == (1, None)
    assert len(routings["layers"][-1]["weights"]) == 1
    assert len(best["tokens"]) == 1


def test_the_api_describes_itself(folder: Path) -> None:
    api = with_app(folder, lambda ask: ask("/openapi.json"))
    assert "/braid/routings" in api["paths"]
    ours = [way for path, ways in api["paths"].items() if "/braid" in path for way in ways.values()]
    assert len(ours) == 10
    assert all(way.get("description") for way in ours)
    assert "Jensen-Shannon" in str(api["components"]["schemas"]["ChangedToken"])


def test_odd_bodies_never_fail_inside(folder: Path) -> None:
    """Whatever a body holds, the answer is an error of the client's, or an answer."""
    rng = random.Random(5)
    values: list[Any] = ["letters", "gated", "", "a\u0000b", "💥" * 50, None, 3, -1, 1e99, True, [], {}, [[]], ["x"]]
    values += [[0, 5], [2**70], {"paths": []}, {"paths": ["maths"]}, {"without": ["*"]}, {"members": ["maths"]}]
    keys = ["model", "prompt", "text", "tokens", "top", "switches", "against", "other", "odd"]

    async def work(ask: Ask) -> set[int]:
        codes = set()
        for _ in range(300):
            kind = rng.choice(["tokens", "next", "routings", "changes"])
            text = {"prompt": "a"} if kind == "next" else {"text": "a"}
            body = {"model": "letters", **text} | {rng.choice(keys): rng.choice(values) for _ in range(2)}
            response = await ask(f"/braid/{kind}", None, raw=True, **body)
            codes.add(response.status_code)
            assert response.status_code in (200, 400, 404), (body, response.text)
            assert "error" in response.json() or response.status_code == 200
        return codes

    assert with_app(folder, work) == {200, 400, 404}


def test_many_requests_at_once_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)

    async def work(ask: Ask) -> Any:
        asked = [ask("/braid/routings", None, raw=True, model="letters", text=TEXT) for _ in range(12)]
        codes = [answer.status_code for answer in await asyncio.gather(*asked)]
        return codes, await ask("/braid/next", model="letters", prompt="a", top=1)

    codes, _ = with_app(folder, work)
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 3


def test_a_decoder_of_transformers_with_gates(folder: Path, tmp_path: Path) -> None:
    save_decoder("llama", folder / "letters", tmp_path / "served/llama")
    save_gates(tmp_path / "served/llama", tmp_path / "served/gates", moved=0.3)
    wanted = generate(tmp_path / "served/gates", TEXT, 1, top_next=3, device="cpu").texts[0].next

    async def work(ask: Ask) -> Any:
        models = (await ask("/braid/models"))["models"]
        routings = await ask("/braid/routings", model="gates", text=TEXT)
        changes = await ask("/braid/changes", model="gates", text=TEXT, switches={"gates_off": ["layer 2", "layer 3"]})
        other = await ask("/braid/changes", model="gates", text=TEXT, other="llama")
        graph = await ask("/braid/models/gates/lineage")
        await ask("/braid/models/gates/facts")
        best = await ask("/braid/next", model="gates", prompt=TEXT, top=3)
        return models, routings, changes, other, best, graph

    models, routings, changes, other, best, graph = with_app(tmp_path / "served", work)
    assert {model["name"]: model["gates"] for model in models} == {"gates": ["layer 2", "layer 3"], "llama": []}
    assert [(layer["kind"], layer["label"]) for layer in routings["layers"]] == [
        ("gates", "layer 2"),
        ("gates", "layer 3"),
    ]
    assert all(weight > 0 for layer in routings["layers"] for (weight,) in layer["weights"])
    assert changes["bits_after"] == pytest.approx(other["bits_after"], rel=1e-5), "without gates it is its base"
    assert changes["bits_after"] != changes["bits_before"]
    assert [token["id"] for token in best["tokens"]] == [token.id for token in wanted]
    assert graph["nodes"][0]["kind"] == "model"
