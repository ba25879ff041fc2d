"""What a stranger or an accident may put before the command: each case is told in words, with exit code 2."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from braidlm.cli import main as command
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of, write_json
from braidlm.core.reading import read_json
from braidlm.training.run_folder import claimed
from tests.outcome import Outcome

Command = Callable[..., Outcome]
LONG = "x" * 300


@pytest.fixture
def anything(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Any verb, in an empty folder, in which nothing may appear."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def run(*arguments: object) -> Outcome:
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse's
            code = int(error.code or 0)
        captured = capsys.readouterr()
        assert list(empty.iterdir()) == []
        return Outcome(code, captured.out, captured.err)

    return run


def told(outcome: Outcome, text: str) -> None:
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert re.search(text, outcome.err), outcome.err


VERBS = [
    ("show", "{}"),
    ("generate", "{}", "a"),
    ("eval", "{}", "bits_per_byte"),
    ("routes", "{}"),
    ("compose", "{}", "other", "--out", "out"),
    ("convert", "{}", "--to", "gpt2", "--out", "out"),
    ("prepare", "{}/text.txt", "--out", "out"),
    ("train", "{}"),
]
MODEL_VERBS = VERBS[:6]


def with_name(verb: tuple[str, ...], name: object) -> list[str]:
    return [word.replace("{}", str(name)) for word in verb]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize(
    "name", [LONG, f"{LONG}/x", "~no-such-user/x", "nowhere/x"], ids=["long", "inside", "user", "none"]
)
def test_a_name_that_stands_for_nothing(anything: Command, verb: tuple[str, ...], name: str) -> None:
    told(anything(*with_name(verb, name)), "error: ")


@pytest.mark.parametrize("verb", MODEL_VERBS[1:], ids=lambda verb: verb[0])
def test_a_file_where_a_folder_is_expected(anything: Command, verb: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    told(
        anything(*with_name(verb, tmp_path / "file")), "file: (a file stands where a folder is expected|this is a file)"
    )


@pytest.mark.parametrize("verb", MODEL_VERBS, ids=lambda verb: verb[0])
def test_a_link_to_nothing(anything: Command, verb: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    told(anything(*with_name(verb, tmp_path / "link")), "link: this link leads to nothing|no recipe and no folder")


def test_a_name_that_is_not_utf8_is_printed(anything: Command, model_folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    told(anything("generate", odd, "a"), r"caf\\udce9")
    model_folder.rename(odd)
    told(anything("generate", odd, "a"), "the name of this folder is not UTF-8")


@pytest.mark.parametrize(
    "content", ["[]", "null", '"text"', "[" * 100_000, "{"], ids=["list", "null", "text", "deep", "cut"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "lineage.json", "tokenizer_config.json"])
def test_a_file_of_a_model_folder_that_is_no_object(
    anything: Command, model_folder: Path, name: str, content: str
) -> None:
    (model_folder / name).write_text(content)
    told(anything("generate", model_folder, "a", "--device", "cpu"), "error: ")


def test_weights_that_are_not_finite(anything: Command, model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, path, {"format": "pt"})
    changed = "model.safetensors is not the file that lineage.json records"
    told(anything("generate", model_folder, "a", "--device", "cpu"), changed)
    assert changed in anything("show", model_folder).out
    lineage = read_json(model_folder / "lineage.json")
    write_json(model_folder / "lineage.json", lineage | {"weights": {"file": path.name, "sha256": sha256_of(path)}})
    damaged = r"weights are not finite \(NaN or infinite\): model.norm.weight"
    told(anything("generate", model_folder, "a", "--device", "cpu"), damaged)
    assert re.search(f"problem: {damaged}", anything("show", model_folder).out)


def test_a_temperature_that_is_no_number(anything: Command, model_folder: Path) -> None:
    told(anything("generate", model_folder, "a", "--temperature", "nan"), "temperature: expected a number .*got nan")


def test_a_recipe_of_a_run_that_is_not_utf8(anything: Command, run_folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_bytes((run_folder / "recipe.yaml").read_bytes())
    (run_folder / "recipe.yaml").write_bytes(b"name: \xff\n")
    told(anything("train", recipe, f"out={run_folder}"), r"recipe\.yaml: this is not UTF-8 text")


def test_an_unknown_kind_of_model_is_told_before_it_is_evaluated(anything: Command, model_folder: Path) -> None:
    config = {"model_type": "surprise", "vocab_size": 300, "auto_map": {"AutoConfig": "evil.Config"}}
    write_json(model_folder / "config.json", config)
    (model_folder / "evil.py").write_text(f"open({str(model_folder / 'ran')!r}, 'w')\n")
    data = f"bits_per_byte={model_folder / 'README.md'}"
    told(anything("eval", model_folder, "bits_per_byte", "--data", data), "transformers cannot open this")
    assert not (model_folder / "ran").exists()


def test_fresh_on_a_read_only_disk(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *rest: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(BraidError, match="no permission to write here"), claimed(run_folder, {"name": "x"}, fresh=True):
        pass
    assert (run_folder / "recipe.yaml").is_file()


def test_a_path_that_nobody_looked_at(anything: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort of the command line."""

    def fail(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", b"/secret/caf\xe9")

    monkeypatch.setattr("braidlm.cli.list.run", fail)
    told(anything("list", "recipes"), r"/secret/caf\\udce9: no permission to open this")
