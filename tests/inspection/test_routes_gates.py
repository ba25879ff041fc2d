"""`braid routes` of models with gates: Braid's, with and without paths, and decoders of transformers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import braidlm
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gated_folders import weights_sha256
from braidlm.opening.gating import attach, gates_of
from tests.inspection.path_models import saved
from tests.report_pages import charts_of
from tests.tiny_decoders import save_adapter
from tests.tiny_models import randomised, tiny_model

VOCABULARY = bytes_tokenizer().vocab_size
TEXTS = {"stories": "Once upon a time there was a cat.\n\nThe end.\n", "maths": "1 + 1 = 2\n\n3 + 4 = 7\n"}


@torch.no_grad()
def sized(model: Any) -> Any:
    """Scalar gates of the sizes 0, 0.1, 0.2 and so on."""
    for number, gate in enumerate(gates_of(model).values()):
        for parameter in gate.parameters():
            parameter.fill_(number / 10)
    return model


@pytest.fixture(scope="session")
def gated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """plain: a stack of blocks; paths: with a parallel stage that chooses; decoder: gates on a Qwen."""
    home = tmp_path_factory.mktemp("gated")
    gates = {"kind": "scalar"}
    choosing = {"parallel": {"layers": 2, "paths": ["stories", "maths"], "join": "gumbel_v1"}}
    plain = tiny_model(vocab_size=VOCABULARY, stages=[{"block": {"layers": 4}}], gates=gates)
    paths = tiny_model(vocab_size=VOCABULARY, stages=["block", choosing, "block"], gates=gates)
    made = {"plain": saved(sized(plain), home / "plain"), "paths": saved(sized(paths), home / "paths")}
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    size["num_key_value_heads"] = 2
    qwen: Any = randomised(
        AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=64, **size))
    )
    qwen.save_pretrained(home / "base")
    bytes_tokenizer().save(home / "base")
    attach(qwen, decode(GatesConfig, gates))
    base = home / "base"
    made["decoder"] = save_adapter(sized(qwen), home / "decoder", str(base), weights_sha256(base), {"made_by": "test"})
    return made | {"base": base}


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text * 3)
    return [f"{name}={tmp_path / name}.txt" for name in TEXTS]


@pytest.mark.parametrize("name", ["plain", "decoder"])
def test_a_model_without_routers_is_shown_by_its_gates(
    routes_verb, gated: dict[str, Path], data: list[str], tmp_path: Path, name: str
) -> None:
    shown = routes_verb(gated[name], "--data", *data, "--out", tmp_path / "report")
    assert shown.code == 0, shown.err
    assert f"{name}: its gates (scalar) over " in shown.out
    assert "the gate of layer 2 is still zero" in shown.out
    assert ["layer", "size", "without", "mean", "without", "gate/output", "stories", "maths", "gain"] in [
        line.split() for line in shown.out.splitlines()
    ]
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"gates.csv", "gate_domains.csv", "routes.html"}
    assert set(charts_of(tmp_path / "report" / "routes.html")) == {"gate_activations", "gate_sizes"}
    with (tmp_path / "report" / "gates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["2", "3", "4"]
    assert [float(row["gain"]) for row in rows] == pytest.approx([0.0, 0.1, 0.2], rel=1e-4)
    assert rows[0]["activation"] == rows[0]["activation_without"]
    assert rows[2]["activation"] != rows[2]["activation_without"]
    page = (tmp_path / "report" / "routes.html").read_text()
    assert "<h1>What gates do</h1>" in page
    assert "of what their layers give, most in layer" in page
    assert page.count('<figure class="picture">') == 2
    again = routes_verb(gated[name], "--data", *data, "--out", tmp_path / "report")
    assert again.code == 0, "an older report is replaced"


def test_facts_for_programs(routes_verb, gated: dict[str, Path], data: list[str]) -> None:
    facts = json.loads(routes_verb(gated["plain"], "--data", *data, "--json").out)
    assert facts["models"] == []
    (gates,) = facts["gates"]
    assert gates["kind"] == "scalar"
    assert [layer["layer"] for layer in gates["layers"]] == [2, 3, 4]
    assert set(gates["layers"][0]["by_domain"]) == {"stories", "maths"}
    assert gates["findings"] == ["the gate of layer 2 is still zero"]


def test_prompts_alone_and_a_notebook(gated: dict[str, Path]) -> None:
    report = braidlm.routes(gated["plain"], prompts=["Once upon a time", "1 + 1"])
    assert report.gated[0].tokens == 21
    html = report._repr_html_()
    assert "gate/output" in html
    assert "still zero" in html


def test_choices_and_gates_of_one_model(routes_verb, gated: dict[str, Path], data: list[str], tmp_path: Path) -> None:
    shown = routes_verb(gated["paths"], "--data", *data, "--out", tmp_path / "report")
    assert shown.code == 0, shown.err
    assert "paths: all tokens of the data" in shown.out
    assert "paths: its gates (scalar)" in shown.out
    page = (tmp_path / "report" / "routes.html").read_text()
    assert "<h1>Who goes where</h1>" in page
    assert '<h2 id="gates">Gates</h2>' in page
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"gates.csv", "layers.csv"} <= files
    assert {"gate_sizes", "shares"} <= charts_of(tmp_path / "report" / "routes.html").keys()


def test_models_side_by_side(routes_verb, gated: dict[str, Path], data: list[str], tmp_path: Path) -> None:
    models = [gated[name] for name in ("plain", "paths", "decoder")]
    shown = routes_verb(*models, "--data", *data, "--out", tmp_path / "report", "--json")
    facts = json.loads(shown.out)
    assert [model["name"] for model in facts["models"]] == ["paths"]
    assert [model["name"] for model in facts["gates"]] == ["plain", "paths", "decoder"]
    with (tmp_path / "report" / "gates.csv").open(newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["plain"] * 3 + ["paths"] * 3 + ["decoder"] * 3


def test_what_is_refused(routes_verb, gated: dict[str, Path], data: list[str], tmp_path: Path) -> None:
    shown = routes_verb(gated["decoder"], "--data", *data, "--paths", "stories")
    assert (shown.code, "only Braid's models and members have paths to choose from" in shown.err) == (2, True)
    plain = tmp_path / "neox"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    shown = routes_verb(plain, "--data", *data)
    assert (shown.code, "this decoder has no gates to look at" in shown.err) == (2, True)
