"""Registries: names, collisions, the nearest name, and parts of other packages."""

from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.config import registry as registry_file
from braidlm.model.config.registry import PARTS, Registry


@pytest.fixture
def colours() -> Iterator[Registry]:
    registry = Registry("colour", third_party=True)
    for name in ("red", "green"):
        registry.register(name)(type(name, (), {"Config": SimpleNamespace}))
    yield registry
    del PARTS["colour"]


def test_parts_are_found_by_name_and_listed_in_order(colours: Registry) -> None:
    assert list(colours) == ["green", "red"]
    assert "red" in colours
    assert "blue" not in colours
    assert colours["red"].__name__ == "red"


def test_registering_a_name_twice_is_a_bug(colours: Registry) -> None:
    with pytest.raises(RuntimeError, match="two parts of kind 'colour' are called 'red'"):
        colours.register("red")(object)


def test_an_unknown_name_is_answered_with_the_nearest(colours: Registry) -> None:
    with pytest.raises(BraidError, match=r"unknown colour 'grene'\. Did you mean 'green'\?") as caught:
        colours["grene"]
    assert "needs that package installed (entry point 'braidlm.parts')" in str(caught.value)
    with pytest.raises(BraidError, match=r"unknown colour 'xyz'\. There are: green, red\."):
        colours["xyz"]


def test_only_the_models_parts_come_from_other_packages() -> None:
    assert all(registry.third_party for registry in PARTS.values())
    own = Registry("shade")
    own.register("dark")(object)
    with pytest.raises(BraidError) as caught:
        own["light"]
    assert str(caught.value) == "unknown shade 'light'. There are: dark."


def test_parts_of_other_packages_are_loaded_when_a_name_is_not_ours(
    colours: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def load() -> None:
        loads.append(1)
        colours.register("blue")(object)

    monkeypatch.setattr(registry_file, "_third_party_loaded", False)
    monkeypatch.setattr(registry_file, "entry_points", lambda group: [SimpleNamespace(load=load)])
    assert "red" in colours
    assert not loads
    assert "blue" in colours
    assert colours["blue"] is object
    assert "mauve" not in colours
    assert loads == [1]


def test_a_list_of_parts_has_those_of_other_packages(colours: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(load=lambda: colours.register("blue")(object))
    monkeypatch.setattr(registry_file, "_third_party_loaded", False)
    monkeypatch.setattr(registry_file, "entry_points", lambda group: [entry])
    assert list(colours) == ["blue", "green", "red"]


def test_a_broken_package_is_named_each_time(colours: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("no module named 'paint'")

    entry = SimpleNamespace(name="paints", value="paints.parts", load=load)
    monkeypatch.setattr(registry_file, "_third_party_loaded", False)
    monkeypatch.setattr(registry_file, "entry_points", lambda group: [entry])
    assert "red" in colours  # ours need nobody
    for _ in range(2):
        with pytest.raises(BraidError, match=r"entry point 'paints' \(paints.parts\): .*no module named 'paint'"):
            colours["blue"]


@pytest.mark.parametrize("noun", PARTS)
def test_every_registered_part_says_what_it_is(noun: str) -> None:
    for kind in PARTS[noun]:
        part = PARTS[noun][kind]
        assert (part.__doc__ or "").strip(), f"{noun} '{kind}' has no docstring; `braid list parts` shows it"
        assert hasattr(part, "Config") or isinstance(part, FunctionType), f"{noun} '{kind}' has no Config"
        assert kind == kind.lower()


def test_did_you_mean() -> None:
    assert did_you_mean("heds", ["heads", "width"]) == " Did you mean 'heads'?"
    assert did_you_mean("zzz", ["b", "a"]) == " There are: a, b."
    assert did_you_mean("zzz", []) == ""


def test_an_error_says_what_where_and_what_to_do() -> None:
    error = BraidError("it broke", "a/b", "Mend it.")
    assert error.lines() == ["a/b: it broke", "Mend it."]
    assert str(error) == "a/b: it broke\nMend it."
    assert BraidError("it broke").lines() == ["it broke"]
    assert isinstance(error, ValueError)
