"""The model card: licence, data and parts from the lineage, and advice that fits the model."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from braidlm.core.models.card import licence_of_folder, model_card
from tests.tiny_models import tiny_model

LINEAGE: dict[str, Any] = {
    "made_by": "braid train",
    "licence": "apache-2.0",
    "recipe": {"data": {"sets": {"stories": {"source": "hub:a/tiny@main:train"}, "maths": {"path": "data/m|aths"}}}},
    "sources": [
        {"data": "stories", "tokens": 2000, "words": 1500},
        {"data": "maths", "tokens": 10, "words": None},
        {"model": "base", "sha256": "0"},
    ],
}


def card(lineage: dict[str, Any], **architecture: Any) -> str:
    model = tiny_model(**architecture)
    return model_card("toy", lineage, model)


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_licence_is_stated_for_the_hub_and_for_people() -> None:
    text = card(LINEAGE)
    assert front_matter(text)["license"] == "apache-2.0"
    assert "## Licence\n\napache-2.0" in text
    without = card({})
    assert "license" not in front_matter(without)
    assert "## Licence\n\nNot stated." in without


def test_a_licence_cannot_break_the_front_matter() -> None:
    assert front_matter(card({"licence": "mit\n---\nx: 'y\""}))["license"] == "mit\n---\nx: 'y\""


def test_a_licence_comes_from_what_a_model_was_made_of() -> None:
    one = {"name": "left", "model": "run", "licence": "mit"}
    text = card({"sources": [one, {**one, "name": "right"}, {"data": "stories"}]})
    assert front_matter(text)["license"] == "mit"
    assert "## Licence\n\nmit, which is the licence of what it was made of." in text
    assert front_matter(card({"licence": "gpl-3.0", "sources": [one]}))["license"] == "gpl-3.0"


@pytest.mark.parametrize(
    ("other", "said"), [({"licence": "gpl-3.0"}, "gpl-3.0"), ({}, "not stated"), ({"licence": 3}, "not")]
)
def test_sources_that_do_not_agree_give_no_licence(other: dict[str, Any], said: str) -> None:
    text = card({"sources": [{"name": "left", "licence": "mit"}, {"name": "right", **other}]})
    assert "license" not in front_matter(text)
    assert f"What it was made of: left: mit; right: {said}" in text


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: mit\ntags: [x]\n---\n# A model\n", "mit"),
        ("---\r\nlicense: 'cc-by-4.0'\r\n---\r\n", "cc-by-4.0"),
        ("---\nlicense: [mit, other]\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- mit\n---\n", None),
        ("license: mit\n", None),
        ("# A model\n---\nlicense: mit\n---\n", None),
        ("\xff", None),
    ],
)
def test_the_licence_of_a_card(tmp_path: Path, text: str, licence: str | None) -> None:
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    assert licence_of_folder(tmp_path) == licence
    assert licence_of_folder(tmp_path / "nothing") is None


def test_the_data_has_its_source_and_size() -> None:
    text = card(LINEAGE)
    assert "| stories | hub:a/tiny@main:train | 2,000 | 1,500 | - |" in text
    assert "| maths | data/m\\|aths | 10 | - | - |" in text
    assert front_matter(text)["datasets"] == ["a/tiny"]


def test_the_data_of_a_composed_models_paths() -> None:
    paths = [{"name": "left", "model": "run", "sources": LINEAGE["sources"]}, {"name": "right", "sources": [3]}]
    assert "| stories | - | 2,000 | 1,500 | left |" in card({"sources": paths})


def test_a_join_stands_as_it_is_given() -> None:
    join = {"kind": "posterior", "window": None, "settle": None}
    assert "braid compose (join posterior)." in card({"made_by": "braid compose", "options": {"join": join}})
    join["settle"] = 16
    text = card({"made_by": "braid compose", "options": {"join": join}})
    assert "braid compose (join {kind: posterior, settle: 16})." in text


def test_parts_are_listed_and_stacks_have_advice() -> None:
    plain = card({})
    assert "| 0: block | 1 |" in plain
    assert "target_parameters" not in plain
    paths = {"parallel": {"layers": 2, "paths": ["left", "right"], "join": "add"}}
    assert "of left, right (add) | 2 |" in card({}, stages=["block", paths])
    assert "target_parameters=stacks" in card({}, stages=["block", paths])
