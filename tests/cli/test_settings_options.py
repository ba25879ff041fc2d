"""Options that are made of a settings class: every kind of field, its help, and what was given."""

import argparse
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from braidlm.cli.settings import add_settings, add_switches, given_settings
from braidlm.evals.evaluated_model import Settings


@dataclass(frozen=True)
class Some:
    allow_it: bool = False
    """Whether it may be done."""
    careful: bool = True
    """Whether to be careful; 100% of people are."""
    count: int = 3
    """How many."""
    rate: float | None = None
    """By default the paper's."""
    kind: Literal["full", "lora"] = "full"
    """Which."""
    names: tuple[str, ...] = ()
    """Some names."""


def made(cls: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_settings(parser, cls, "settings")
    return parser


def test_what_is_not_given_is_the_default() -> None:
    assert Some(**given_settings(made(Some).parse_args([]), Some)) == Some()


def test_every_kind_of_field() -> None:
    words = ["--allow-it", "--no-careful", "--count", "5", "--rate", "1e-4", "--kind", "lora", "--names", "a", "b"]
    expected = Some(allow_it=True, careful=False, count=5, rate=1e-4, kind="lora", names=("a", "b"))
    assert Some(**given_settings(made(Some).parse_args(words), Some)) == expected


@pytest.mark.parametrize("words", [["--count", "many"], ["--kind", "half"], ["--rate"], ["--rate", "nan"]])
def test_wrong_values_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        made(Some).parse_args(words)


def test_help_is_what_stands_under_the_fields() -> None:
    shown = " ".join(made(Some).format_help().split())
    assert "--count N how many (3)" in shown
    assert "--rate X by default the paper's" in shown
    assert "--kind {full,lora} which (full)" in shown
    assert "whether to be careful; 100% of people are" in shown


def test_a_field_that_no_option_can_be_is_our_mistake() -> None:
    @dataclass
    class Odd:
        things: dict[str, int] | None = None

    with pytest.raises(TypeError, match="cannot be an option"):
        made(Odd)


def test_every_setting_of_evaluation_is_an_option_with_help() -> None:
    actions = {action.dest: action for action in made(Settings)._actions}
    for field in fields(Settings):
        assert actions[field.name].help, field.name


@dataclass(frozen=True)
class Needed:
    text: str
    """What must be given."""
    count: int = 3
    """How many."""


def test_options_with_a_prefix_and_a_field_without_a_default() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, Needed, "settings", "more_")
    shown = " ".join(parser.format_help().split())
    assert "--more-text TEXT what must be given --more-count N how many (3)" in shown
    args = parser.parse_args(["--more-text", "a", "--more-count", "5"])
    assert Needed(**given_settings(args, Needed, "more_")) == Needed("a", 5)
    assert given_settings(parser.parse_args([]), Needed, "more_") == {}


def test_modules_with_spaces_or_commas_between() -> None:
    parser = argparse.ArgumentParser()
    add_switches(parser.add_argument)
    assert parser.parse_args([]).without is None
    args = parser.parse_args(["--without", "a,b", "c", "--without", "*.feed:d*"])
    assert args.without == ["a", "b", "c", "*.feed:d*"]
    assert parser.parse_args(["--paths", "a,b", "c"]).paths == ["a", "b", "c"]
