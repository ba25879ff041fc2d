"""Command lines of any options with any words: a result or an error in words, by exit code 0 or 2."""

import argparse
import os
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, note

from braidlm.cli.main import main, make_parser
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import load_tokenizer
from tests.edits.small_models import TEXT
from tests.fuzz.choices import CASES
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import YAML_VALUES, seeded
from tests.tiny_models import BASE, tiny_model

VERBS = ("show", "generate", "eval", "routes", "compose", "convert", "prepare", "edit", "train", "compare", "list")
"""Those that come to an end by themselves, offline."""
LEFT_OUT = ("debug", "help", "cluster", "harness", "allow_code_execution", "workers", "table_workers")
FILES = ("model", "model", "other", "text.txt", "packed", "recipe.yaml", "empty", "pipe", "circle", "locked", "[/x]")
ODD = (
    "",
    "-1",
    "0",
    "1",
    "2",
    "0.5",
    "nan",
    "1e999",
    "9" * 25,
    "x",
    "a=b",
    "=",
    "[/x]",
    "\ud800",
    "é",
    "-",
    "~",
    "..",
    "%s",
)
FITTING = ("stories", "bits_per_byte", "blimp", "llama", "gguf", "all", "1", "2", "a", "text=text.txt", "bytes", "out")
KEYS = (
    "out",
    "name",
    "model.width",
    "model.stages",
    "model.block",
    "training.freeze",
    "training.optimizer",
    "data.length",
)
KEYS += ("data.sets.stories", "data.sets.stories.holdout", "+data.sets.x.source", "~model", "seed", "training.schedule")
VALUES = (
    "[block:{layers: 1}]",
    "{kind: muon}",
    "{layers: 2}",
    "[paths]",
    "8",
    "0,1",
    "a (b)",
    "läufe",
    "'x'",
    "[a, b]",
    "a: b",
)
NUMBERS = {"N": ("1", "2", "3"), "X": ("0.5", "1")}
WORDS = {"train": "recipe.yaml", "compare": "recipe.yaml", "prepare": "text.txt", "list": "parts"}
NOT_LONG: dict[str, list[str]] = {
    "generate": ["--device", "cpu", "--max-tokens", "2"],
    "eval": ["bits_per_byte", "--device", "cpu", "--data", "bits_per_byte=text.txt"],
    "routes": ["--device", "cpu", "--data", "text=text.txt"],
    "prepare": ["--documents", "3"],
    "train": ["training.budget=1 steps", "--device", "cpu"],
    "compare": ["--device", "cpu"],
}


@pytest.fixture(scope="module")
def folder(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: two models, text, packed text, a recipe, and files that cannot be read."""
    home = tmp_path_factory.mktemp("arguments")
    tokenizer = load_tokenizer(sets["stories"])
    for name, stages in {"model": ["block", "block"], "other": [{"parallel": {"paths": 2}}]}.items():
        save_model(tiny_model(vocab_size=300, stages=stages), home / name, tokenizer, {"made_by": "a test"})
    (home / "text.txt").write_text(TEXT)
    (home / "packed").symlink_to(sets["stories"])
    data = {"length": 16, "sets": {"stories": {"path": sets["stories"], "holdout": 0.1}}}
    recipe = {"out": "run", "model": BASE, "data": data, "training": {"budget": "1 steps", "batch": 2}}
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"validation": {"tokens": 64}}))
    (home / "empty").mkdir()
    os.mkfifo(home / "pipe")
    (home / "circle").symlink_to("circle")
    (home / "locked").touch(mode=0)
    return home


@seeded(40)
@given(CASES)
def test_any_command_line(folder: Path, rng: Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = words_of(rng)
        note(f"braid {words}")
        with honest():
            try:
                code: Any = main(words)
            except SystemExit as ended:  # argparse's
                code = ended.code
            assert code in (0, 2)


def words_of(rng: Random) -> list[str]:
    verb = rng.choice(VERBS)
    parser, words = parser_of(verb), [verb]
    kinds = next((one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
    if kinds is not None:
        words.append(rng.choice(sorted(kinds)))
        parser = kinds[words[-1]]
    options = [one for one in parser._actions if one.dest not in LEFT_OUT]
    for one in options:
        if not one.option_strings:
            words += [word(rng, one, verb) for _ in range(rng.choice([1, 1, 2]) if one.nargs else 1)]
    words += NOT_LONG.get(verb, [])
    named = [one for one in options if one.option_strings]
    wanted = [one for one in named if one.required or one.dest == "out"]
    for one in [*wanted, *rng.sample(named, rng.randint(0, 2))]:
        words.append(rng.choice(one.option_strings))
        count = 0 if one.nargs == 0 else rng.choice([1, 1, 2]) if one.nargs in ("+", "*") else 1
        words += [f"out-{rng.getrandbits(64):x}" if one.dest == "out" else word(rng, one, verb) for _ in range(count)]
    for _ in range(rng.randint(0, 2) if verb in ("train", "show") else 0):
        words.append(f"{rng.choice(KEYS)}={rng.choice([*ODD, *VALUES, *YAML_VALUES])}")
    return words


def word(rng: Random, option: argparse.Action, verb: str) -> str:
    """What often fits, and what does not."""
    if option.choices and rng.random() < 0.8:
        return str(rng.choice(list(option.choices)))
    if rng.random() < 0.1:
        return rng.choice(ODD)
    if option.metavar in NUMBERS:
        return rng.choice(NUMBERS[option.metavar])
    if not option.option_strings and rng.random() < 0.8:
        return WORDS.get(verb, "model")
    return rng.choice(FILES if rng.random() < 0.5 else FITTING)


@cache
def parser_of(verb: str) -> argparse.ArgumentParser:
    verbs = next(one for one in make_parser(verb)._actions if isinstance(one, argparse._SubParsersAction))
    found: argparse.ArgumentParser = verbs.choices[verb]
    return found
