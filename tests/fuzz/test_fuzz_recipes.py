"""Recipes that were damaged or made to harm: composed, decoded and planned, or refused."""

from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.recipes import compose_recipe, find_recipe, is_study
from braidlm.studies.show import recipe_facts
from braidlm.studies.study_facts import study_facts
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import changed, rewritten, seeded

NAMES = ("tiny/gpt2", "tiny/moep", "tiny/paths", "models/papaformer-path-128", "demo/paths", "demo/stories")


@cache
def composed(name: str) -> dict[str, Any]:
    return compose_recipe(name)


@cache
def text_of(name: str) -> str:
    return find_recipe(name).read_text()


def planned(data: dict[str, Any]) -> None:
    """What `braid show` does with a recipe: everything but running it."""
    if is_study(data):
        study_facts("mine", data)
    else:
        recipe_facts("mine", data)


@seeded(400)
@given(st.sampled_from(NAMES).flatmap(lambda name: changed(composed(name))))
def test_values_that_do_not_belong(data: Any) -> None:
    with honest():
        if isinstance(data, dict):  # composing gives nothing else
            planned(data)


@seeded(80)
@given(st.sampled_from(NAMES).flatmap(lambda name: rewritten(text_of(name))))
def test_text_that_was_changed(text: bytes) -> None:
    path = Path("mine.yaml")
    path.write_bytes(text)
    with honest():
        planned(compose_recipe(str(path)))
