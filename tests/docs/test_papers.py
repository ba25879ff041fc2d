"""Each paper has a page that names all of its recipes, and `braid list papers` leads there."""

import re
import shlex
from pathlib import Path

import yaml

from braidlm.core.recipes import compose_recipe, list_recipes

PAGES = Path(__file__).parents[2] / "docs" / "papers"


def test_a_papers_page_names_each_of_its_recipes() -> None:
    recipes = [name for name, _ in list_recipes() if name.startswith("papers/")]
    assert len(recipes) > 30
    missing = [
        name
        for name in recipes
        if not re.search(rf"{name}(?![\w/-])", (PAGES / f"{name.split('/')[1]}.md").read_text(encoding="utf-8"))
    ]
    assert not missing


def test_each_page_says_what_holds_and_where_braid_departs() -> None:
    papers = {name.split("/")[1] for name, _ in list_recipes() if name.startswith("papers/")}
    for paper in papers:
        text = (PAGES / f"{paper}.md").read_text(encoding="utf-8")
        assert "| verdict |" in text
        assert "## Where Braid departs from the paper, and why" in text


def test_the_plan_of_rows_that_are_not_run_yet_composes(tmp_path: Path) -> None:
    """Each of its trainings, with the first values of its table; what they read is looked for when they run."""
    plan = yaml.safe_load((PAGES.parents[1] / "benchmarks" / "plans" / "rows.yaml").read_text(encoding="utf-8"))
    composed = set()
    for facts in plan.values():
        values = {name: each[0] for name, each in facts.get("each", {}).items()}
        places = {"data": tmp_path, "out": tmp_path, "part": ""}
        for command in (text.format(**places, **values) for text in facts["run"]):
            first, second, *_ = (*str(values.get("technique", "")).split(), "", "")
            command = command.replace("$1", first).replace("$2", second)
            for words in re.findall(r"braid train (.*)", command):
                recipe, *overrides = (word for word in shlex.split(words) if word != "--quiet")
                assert compose_recipe(recipe, overrides)["out"].startswith(str(tmp_path))
                composed.add(recipe)
    assert len(composed) >= len(plan) - 2, "all tables but those that evaluate another's models and measure speed"
