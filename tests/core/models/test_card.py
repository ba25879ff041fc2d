"""The model card: licence, data and parts from the lineage, and advice that fits the model."""

from typing import Any

import yaml

from braidlm.core.models.card import model_card
from tiny_models import tiny_model

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
    return model_card("toy", model.config, model, lineage)


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


def test_the_data_has_its_source_and_size() -> None:
    text = card(LINEAGE)
    assert "| stories | hub:a/tiny@main:train | 2,000 | 1,500 | - |" in text
    assert "| maths | data/m/aths | 10 | - | - |" in text
    assert front_matter(text)["datasets"] == ["a/tiny"]


def test_the_data_of_a_composed_models_paths() -> None:
    paths = [{"name": "left", "model": "run", "sources": LINEAGE["sources"]}, {"name": "right", "sources": [3]}]
    assert "| stories | - | 2,000 | 1,500 | left |" in card({"sources": paths})


def test_parts_are_listed_and_stacks_have_advice() -> None:
    plain = card({})
    assert "| 0: block | 1 |" in plain
    assert "target_parameters" not in plain
    paths = {"parallel": {"layers": 2, "paths": ["left", "right"], "join": "add"}}
    assert "of left, right (add) | 2 |" in card({}, stages=["block", paths])
    assert "target_parameters=stacks" in card({}, stages=["block", paths])
