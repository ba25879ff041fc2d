"""Each paper has a page that names all of its recipes, and `braid list papers` leads there."""

import re
from pathlib import Path

from braidlm.core.recipes import list_recipes

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
