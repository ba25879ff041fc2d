"""The command itself: where overrides may stand, and what a broken verb does to the others."""

import importlib
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import braidlm.cli
from braidlm.cli import main as command

SMALL = ["width=64", "block.attention.heads=4", "vocab_size=100"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "models/gpt2", *SMALL, "--length", "128", "--json"],
        ["show", "models/gpt2", "--length", "128", *SMALL, "--json"],
        ["show", "--json", "models/gpt2", SMALL[0], "--length", "128", *SMALL[1:]],
        ["show", "--length", "128", "--json", "models/gpt2", *SMALL],
    ],
    ids=["before", "behind", "around", "last"],
)
def test_overrides_stand_anywhere(braid, arguments: list[str]):
    facts = braid(*arguments).json()
    assert (facts["width"], facts["vocab_size"], facts["length"]) == (64, 100, 128)


def test_train_takes_overrides_behind_options():
    parser = command.make_parser("train")
    args = command._parse(parser, ["train", "tiny/llama", "seed=2", "--device", "cpu", "training.batch=4", "--fresh"])
    assert (args.recipe, args.overrides, args.device) == ("tiny/llama", ["seed=2", "training.batch=4"], "cpu")
    assert args.fresh


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["show", "models/gpt2", "--lenght", "128"],
            "braid show: there is no option '--lenght'. Did you mean '--length'?",
        ),
        (["train", "tiny/llama", "seed=2", "--devcie=cpu"], "there is no option '--devcie'. Did you mean '--device'?"),
        (
            ["edit", "quantize", "recipes", "--shceme", "int8"],
            "braid edit quantize: there is no option '--shceme'. Did you",
        ),
        (["list", "parts", "width=3"], "braid list: error: unrecognized arguments: width=3"),
        (["list"], "Say what: recipes, papers, parts, data, tasks."),
        (["edit"], "Name one: factorize, gate, insert, prune,"),
        (["train"], "the following arguments are required: RECIPE\n"),
    ],
)
def test_what_is_not_understood_is_said(capsys, arguments: list[str], text: str):
    try:
        code = command.main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("word", "near"), [("shwo", "show"), ("tran", "train"), ("genrate", "generate")])
def test_the_nearest_verb_is_named(capsys, word: str, near: str):
    assert command.main([word]) == 2
    assert f"there is no verb '{word}'. Did you mean '{near}'?" in capsys.readouterr().err


def test_the_nearest_kind_of_edit_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["edit", "prun", "recipes"])
    assert "braid edit: there is no kind 'prun'. Did you mean 'prune'?" in capsys.readouterr().err


def test_a_broken_verb_does_not_break_the_others(braid, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "VERBS", ("nonsense", "list"))
    assert braid("list", "recipes").code == 0
    shown = braid()
    assert shown.code == 0
    assert "list what exists" in shown.out
    assert "does not load" in shown.out
    with pytest.raises(ModuleNotFoundError):
        braid("nonsense")


VERB = """
HELP = "say hello"

def add_arguments(parser):
    parser.add_argument("who")

def run(args):
    from braidlm.core.console import show
    show(f"Hello, {args.who}.")
"""


def test_a_verb_is_one_file(braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "greet.py").write_text(VERB)
    monkeypatch.setattr(braidlm.cli, "__path__", [*braidlm.cli.__path__, str(tmp_path)])
    monkeypatch.setattr(command, "VERBS", command.find_verbs())
    monkeypatch.delitem(sys.modules, "braidlm.cli.greet", raising=False)
    assert command.VERBS[-2:] == ("completion", "greet")
    assert "say hello" in braid().out
    assert braid("greet", "Ada").out == "Hello, Ada.\n"


def test_only_the_chosen_verb_is_imported(braid, monkeypatch: pytest.MonkeyPatch):
    class Exploding(ModuleType):
        def __getattr__(self, name: str):
            raise AssertionError(f"{self.__name__}.{name} was used")

    monkeypatch.setitem(sys.modules, "braidlm.cli.generate", Exploding("braidlm.cli.generate"))
    assert braid("list", "recipes").code == 0


def test_python_m_imports_nothing_from_the_current_folder(tmp_path: Path):
    (tmp_path / "argparse.py").write_text("raise SystemExit('a module of the current folder was imported')")
    (tmp_path / "rich.py").write_text("raise SystemExit('a module of the current folder was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "braidlm", "list", "recipes"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tiny/llama" in done.stdout


def test_the_help_says_where_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "Begin with `braid demo` or `braid train tiny/llama`" in " ".join(capsys.readouterr().out.split())


EXAMPLES = [
    line.strip()
    for verb in command.VERBS
    for line in getattr(importlib.import_module(f"braidlm.cli.{verb}"), "EPILOG", "").splitlines()
    if line.startswith("  braid ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_help_are_commands(example: str) -> None:
    """Each has only verbs, kinds, options and values that exist."""
    words = shlex.split(example)[1:]
    command._parse(command.make_parser(words[0]), words)
