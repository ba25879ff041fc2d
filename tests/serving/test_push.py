"""Pushing to a stand-in for the Hub: what arrives is the model, what its card tells, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.opening.open import open_model
from braidlm.serving.push import push
from tests.inspection.path_models import TOKENIZER, path_model
from tests.serving.stand_in_hub import TOKEN, Hub, stand_in_hub
from tests.tiny_decoders import save_decoder, save_gates

LINEAGE: dict[str, Any] = {
    "made_by": "braid train",
    "licence": "apache-2.0",
    "recipe": {"data": {"sets": {"stories": {"source": "hub:a/tiny@main:train"}}}},
    "sources": [{"data": "stories", "tokens": 2000, "words": 1500}, {"model": f"org/base@{'0' * 40}"}],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub talks to, by the endpoints that it has without Xet."""
    with stand_in_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, and things in it that are not part of the model."""
    monkeypatch.chdir(tmp_path)
    made = save_model(path_model("gumbel_v2"), tmp_path / "model", TOKENIZER, LINEAGE)
    for name in ("optimizer.pt", "notes.txt", ".env", "train.log"):
        (made / name).write_text("mine")
    (made / "states").mkdir()
    return made


def told(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_folder_that_arrives_gives_equal_logits(folder: Path, hub: Hub, tmp_path: Path) -> None:
    done = push(folder, "org/tiny")
    assert done.url == f"{hub.url}/org/tiny"
    assert done.commit is not None
    repository = hub.repositories["org/tiny"]
    assert repository.private, "the default of a new one"
    assert repository.messages == ["model, pushed with Braid"]
    arrived = hub.save("org/tiny", tmp_path / "arrived")
    assert {path.name for path in arrived.iterdir()} == set(done.files)
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_braid.py", "README.md"} <= set(done.files)
    assert set(done.left_out) == {"optimizer.pt", "notes.txt", "states", "train.log"}
    ids = torch.tensor([TOKENIZER.encode("Once upon 12")])
    one, other = (open_model(each).load()(ids).logits for each in (folder, arrived))
    assert torch.equal(one, other)


def test_the_card(folder: Path, hub: Hub) -> None:
    card = push(folder, "org/tiny", language=["en"], tags=["stories"], licence="mit").card
    assert told(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["braid", "stories"],
        "license": "mit",
        "datasets": ["a/tiny"],
        "base_model": ["org/base"],
        "language": ["en"],
    }
    assert "# tiny\n" in card
    assert "## Licence\n\nmit" in card
    assert hub.repositories["org/tiny"].branches["main"]["README.md"].decode() == card


def test_a_card_that_somebody_wrote_is_kept(folder: Path, hub: Hub) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: de\ntags: [mine]\n---\n# Mine\n\nBy hand.\n")
    card = push(folder, "tiny", private=False).card
    assert card.endswith("# Mine\n\nBy hand.\n")
    assert told(card)["license"] == "mit"
    assert told(card)["tags"] == ["mine"]
    assert told(card)["language"] == "de"
    assert told(card)["library_name"] == "transformers"
    assert not hub.repositories["me/tiny"].private


def results(folder: Path, **changes: Any) -> dict[str, Any]:
    score = {"metric": "accuracy", "score": 62.5, "count": 200, "standard_error": 1.25}
    one = {"name": "m", "sha256": open_model(folder).sha256, "paths": None, "without": None, "tasks": {"blimp": score}}
    about = {"description": "Minimal\npairs: grammar", "version": 1, "sha256": "ab"}
    return {"format": 1, "models": [{"name": "other", "sha256": "x"}, one | changes], "tasks": {"blimp": about}}


def test_evaluation_results_in_the_form_of_the_hub(folder: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/results.json").write_text(json.dumps(results(folder)))
    done = push(folder, "org/tiny", dry_run=True)
    assert done.results == "evaluation/results.json"
    (index,) = told(done.card)["model-index"]
    assert index["name"] == "tiny"
    (entry,) = index["results"]
    assert entry["task"]["type"] == "text-generation"
    assert entry["dataset"] == {
        "type": "blimp", "name": "Minimal pairs: grammar", "args": {"version": 1, "sha256": "ab"}
    }  # fmt: skip
    (metric,) = entry["metrics"]
    assert (metric["type"], metric["value"], metric["args"]) == (
        "accuracy",
        62.5,
        {"items": 200, "standard_error": 1.25},
    )
    assert "| blimp | accuracy | 62.5 ± 1.2 | 200 |" in done.card
    from huggingface_hub import ModelCard

    (read,) = ModelCard(done.card).data.eval_results  # as the Hub's own library reads it
    assert (read.dataset_type, read.metric_value) == ("blimp", 62.5)


@pytest.mark.parametrize("changes", [{"sha256": "another"}, {"without": ["expert_1"]}, {"tasks": {}}])
def test_results_of_another_model_are_not_used(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results(folder, **changes)))
    assert push(folder, "org/tiny", dry_run=True).results is None
    with pytest.raises(BraidError, match="not results of this model"):
        push(folder, "org/tiny", results=tmp_path, dry_run=True)


def test_a_dry_run_sends_nothing(folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), "org/tiny", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown
    assert "left out: notes.txt, optimizer.pt, states, train.log" in shown
    assert "license: apache-2.0" in shown
    assert hub.requests == []


def test_an_existing_repository_stays_as_visible_as_it_is(folder: Path, hub: Hub) -> None:
    push(folder, "tiny", private=False)
    push(folder, "me/tiny", message="again", licence="mit")
    assert not hub.repositories["me/tiny"].private
    assert hub.repositories["me/tiny"].messages == ["model, pushed with Braid", "again"]
    push(folder, "me/tiny", private=True, licence="apache-2.0")
    assert hub.repositories["me/tiny"].private


def test_a_branch(folder: Path, hub: Hub) -> None:
    push(folder, "org/tiny", revision="step-100")
    branches = hub.repositories["org/tiny"].branches
    assert "model.safetensors" in branches["step-100"]
    assert branches["main"] == {}


def test_the_token_is_asked_for_and_never_shown(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(BraidError, match="not logged in") as error:
        push(folder, "org/tiny")
    assert "hf auth login" in str(error.value.todo)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.users = {}
    with pytest.raises(BraidError, match="does not accept your token"):
        push(folder, "org/tiny")
    hub.users = {f"Bearer {TOKEN}": "me"}
    with pytest.raises(BraidError, match="may not write here"):
        push(folder, "strangers/tiny")
    with pytest.raises(BraidError, match="license"):
        push(folder, "org/tiny", licence="mine")
    assert main(["push", str(folder), "strangers/tiny"]) == 2
    assert main(["push", str(folder), "org/tiny", "--json"]) == 0
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err


def test_a_hub_that_cannot_be_reached(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BraidError, match="cannot be reached"):
        push(folder, "org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BraidError, match="HF_HUB_OFFLINE"):
        push(folder, "org/tiny")


@pytest.mark.parametrize("name", ["a/b/c", "a b", "../x", "org/", "-x", "x" * 200])
def test_names_that_the_hub_cannot_have(folder: Path, name: str) -> None:
    with pytest.raises(BraidError, match="cannot have a model of this name"):
        push(folder, name, dry_run=True)


def test_what_should_not_be_pushed(folder: Path, hub: Hub) -> None:
    weights, tokenizer = folder / "model.safetensors", (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BraidError, match="no tokenizer"):
        push(folder, "org/tiny")
    (folder / "tokenizer.json").write_text(tokenizer)
    lineage = LINEAGE | {"licence": None, "sources": [{"name": "a", "licence": "mit"}, {"name": "b", "licence": "gpl"}]}
    conflict = save_model(path_model("gumbel_v2"), folder.parent / "conflict", TOKENIZER, lineage)
    with pytest.raises(BraidError, match=r"different licences \(a: mit; b: gpl\)"):
        push(conflict, "org/tiny")
    assert told(push(conflict, "org/tiny", licence="mit", dry_run=True).card)["license"] == "mit"
    tensors = load_file(weights)
    tensors["model.embedding.weight"][0, 0] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    (folder / "lineage.json").unlink()
    with pytest.raises(BraidError, match="not finite"):
        push(folder, "org/tiny")
    assert hub.requests == []


def test_decoders_of_transformers_and_their_adapters(
    folder: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = save_decoder("llama", folder, tmp_path / "llama")
    card = push(llama, "org/llama").card
    assert told(card) == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert card.endswith("# llama\n")
    arrived = open_model(hub.save("org/llama", tmp_path / "arrived"))
    ids = torch.tensor([TOKENIZER.encode("Once upon 12")])
    assert torch.equal(arrived.load()(ids).logits, open_model(llama).load()(ids).logits)
    gates = save_gates(llama, tmp_path / "gates", moved=0.1)
    with pytest.raises(BraidError, match="for a model in a folder of this machine"):
        push(gates, "org/gates")
    opened: Any = open_model(gates)
    opened.base.hub = "org/llama"
    monkeypatch.setattr("braidlm.serving.push.open_model", lambda model: opened)
    done = push("gates", "org/gates")
    assert told(done.card)["base_model"] == ["org/llama"]
    assert {"gates.safetensors", "gate_config.json"} <= set(done.files)
