"""`--json` on every verb: one document on standard output, messages on standard error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidlm.cli import main as command
from braidlm.core import console

RECIPE = """
name: little
model: {width: 16, context: 32, block: {attention: {heads: 2}}, stages: [block]}
data:
  length: 32
  cache: CACHE
  tokenizer: {kind: bytes}
  sets: {stories: {source: stories, documents: 20, holdout: 0.1}}
training: {budget: 2 steps, batch: 2}
validation: {every: 2 steps, tokens: 200}
"""


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `braid ... --json` and return the one document that it prints."""

    def run(*arguments: object) -> Any:
        assert command.main([*map(str, arguments), "--json"]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out)

    return run


@pytest.mark.parametrize("verb", command.VERBS)
def test_every_verb_has_the_option(verb: str) -> None:
    parser = command.make_parser(verb)
    (verbs,) = (action for action in parser._actions if action.dest == "verb")
    assert "--json" in verbs.choices[verb]._option_string_actions  # type: ignore[index]


def test_prepare_and_train(document: Callable[..., Any], tmp_path: Path) -> None:
    facts = document("prepare", "stories", "--documents", 20, "--tokenizer", "bytes", "--out", tmp_path / "packed")
    assert facts["documents"] == 20
    assert facts["folder"] == str(tmp_path / "packed")
    recipe = tmp_path / "little.yaml"
    recipe.write_text(RECIPE.replace("CACHE", str(tmp_path / "cache")))
    facts = document("train", recipe, f"out={tmp_path / 'run'}", "--device", "cpu")
    assert (facts["steps"], facts["finished"]) == (2, True)
    assert Path(facts["model"]).is_dir()


def test_the_other_verbs(document: Callable[..., Any], model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One day a cat sat.\n")
    assert document("show", model_folder)["kind"] == "model"
    assert document("show", model_folder, "tiny/gpt2")["kind"] == "comparison"
    assert document("list", "recipes")[0]["name"]
    assert document("generate", model_folder, "A", "--max-tokens", 2)["texts"][0]["tokens"] == 2
    assert document("convert", model_folder, "--to", "gpt2", "--out", tmp_path / "gpt2")["model"]
    assert document("compose", model_folder, tmp_path / "gpt2", "--names", "a", "b", "--dry-run")["model"] is None
    options = ("--data", f"bits_per_byte={text}", "--out", tmp_path / "out", "--device", "cpu")
    assert document("eval", model_folder, "bits_per_byte", *options)["tasks"]["bits_per_byte"]["data"] == str(text)
    assert "complete" in document("completion", "bash")["script"]


def test_an_error_leaves_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", "nothing", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "there is no recipe and no folder 'nothing'" in captured.err


def test_messages_and_other_output_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with console.json_output(True):
        console.say("working")
        console.show("for people")
        console.table(("a",), [("for people",)])
        print("a library")
        console.show_json({"path": Path("x"), "bad": float("nan"), "numbers": (1, 2.5)})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"path": "x", "bad": None, "numbers": [1, 2.5]}
    assert captured.err == "working\na library\n"


def test_without_the_option_nothing_is_printed_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_json({"a": 1})
    console.show("for people")
    assert capsys.readouterr().out == "for people\n"
