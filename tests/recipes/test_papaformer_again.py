"""PaPaformer's question under the settings of best/average: both sides alike, and a run at toy size."""

import csv
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.model.config.strict import encode
from braidlm.studies.decoding import load_study
from braidlm.studies.show import show
from tests.recipes.source_files import write_sources

DOMAINS = {
    "papers/papaformer/spoken-and-written": ["spoken", "written"],
    "papers/papaformer/stories-and-maths": ["stories", "maths"],
}
OWNERS = {
    "papers/papaformer/spoken-and-written": [
        *("spoken_owner", "written_owner", "owners", "owners_judged", "owners_student"),
    ],
    "papers/papaformer/stories-and-maths": [],
}
LONGER = {"papers/papaformer/spoken-and-written": ["dense_longer"], "papers/papaformer/stories-and-maths": []}
RECIPES = pytest.mark.parametrize("recipe", DOMAINS)


def toy(recipe: str, folder: Path) -> list[str]:
    """Overrides that leave everything of a recipe but its sizes."""
    changes = [*write_sources(recipe, folder), f"out={folder / 'out'}", f"data.cache={folder / 'cache'}", "seeds=[1]"]
    changes += ["data.length=32", "data.tokenizer.vocab_size=400", "training.batch=4", "training.warmup=2"]
    changes += ["epochs=0.05", "validation.tokens=300", "training.lengths=[{until: 0.7, length: 8}]"]
    students = [name for name in OWNERS[recipe] if name == "owners_student"]
    changes += [f"steps.{name}.train.epochs=0.125" for name in ("shared", *LONGER[recipe], *students)]
    for model in ("path", "dense", "llama_256"):
        changes += [f"models.{model}.{key}" for key in ("width=32", "context=32", "stages[0].block.layers=1")]
    return changes


@RECIPES
def test_equal_flops_and_parameters(recipe: str) -> None:
    models = {row["name"]: row for row in show(recipe)["models"]}
    for composed in ("shared_linear", "gumbel_v1"):
        assert models["dense"]["flops_per_token"] == pytest.approx(models[composed]["flops_per_token"], rel=0.001)
        assert models["dense"]["parameters"] == pytest.approx(models[composed]["parameters"], rel=0.015)
    assert all(models["shared"][key] == models["dense"][key] for key in ("flops_per_token", "parameters"))
    assert [models[name]["width"] for name in (*DOMAINS[recipe], "shared_linear", "llama_256")] == [128, 128, 256, 256]
    assert [models[name]["layers"] for name in (*DOMAINS[recipe], "llama_256")] == [3, 3, 8]


@RECIPES
def test_equal_tokens(recipe: str) -> None:
    """Paths and what is made of them read together what a dense model reads."""
    study = load_study(recipe)
    alike = [*DOMAINS[recipe], "shared_linear", "gumbel_v1", "dense", "llama_256"]
    assert {study.epochs_of(name) for name in alike} == {study.epochs}
    ((begin, end),) = {study.part_of_text("shared", domain) for domain in study.domains_of("shared")}
    assert study.epochs_of("shared") * (end - begin) == pytest.approx(study.epochs)
    for name in LONGER[recipe]:  # what is made of `shared` has its tokens and those of a training of all text
        assert study.epochs_of(name) == 2 * study.epochs
    assert study.seeds == [1, 2, 3]


@RECIPES
def test_the_settings_are_those_of_the_averages(recipe: str) -> None:
    ours, best = (encode(load_study(name)) for name in (recipe, "best/average"))
    assert {key for key in best["training"] if ours["training"][key] != best["training"][key]} == {"batch", "warmup"}
    assert ours["training"]["batch"] * ours["data"]["length"] == best["training"]["batch"] * best["data"]["length"]
    wanted = best["models"]["wide"]["initialisation"]
    assert all(model["initialisation"] == wanted for model in ours["models"].values())


@pytest.mark.slow
def test_from_text_to_the_report(tmp_path: Path) -> None:
    """Of spoken and written English: it has every step of the other recipe, and the owners' recipe has its sources."""
    recipe = "papers/papaformer/spoken-and-written"
    assert main(["train", recipe, *toy(recipe, tmp_path), "--device", "cpu"]) == 0
    rows = {row["model"]: row for row in csv.DictReader((tmp_path / "out/tables/cost.csv").read_text().splitlines())}
    composed = ["shared_linear", "gumbel_v1"]
    assert list(rows) == [*DOMAINS[recipe], *composed, "dense", "llama_256", "shared", *LONGER[recipe], *OWNERS[recipe]]
    # An average's own tokens are its members', and `owners` has what its members began with among them.
    two_trainings = {*composed, *OWNERS[recipe]} - {"owners", "owners_student"}
    assert {name for name, row in rows.items() if "+" in row["words"]} == two_trainings
    assert (tmp_path / "out/tables/training-time.csv").is_file()
    assert (tmp_path / "out/report.html").is_file()


@pytest.mark.slow
def test_owners(tmp_path: Path) -> None:
    """Every model of `papers/papaformer/owners` has one shape, and an owner's begins with what all share."""
    recipe = "papers/papaformer/owners"
    models = {row["name"]: row for row in show(recipe)["models"]}
    alike = ("stories", "maths", "shared", "shared_longer", "dense", "stories_owner", "maths_owner")
    assert len({models[name]["parameters"] for name in (*alike, "owners_student")}) == 1
    assert models["owners"]["flops_per_token"] == 3 * models["dense"]["flops_per_token"]
    assert models["owners_mixture"]["parameters"] == models["mixture"]["parameters"]
    changes = [*write_sources(recipe, tmp_path), f"out={tmp_path / 'out'}", f"data.cache={tmp_path / 'cache'}"]
    changes += ["seeds=[1]", "data.length=32", "data.tokenizer.vocab_size=400", "training.batch=4"]
    changes += [
        "training.warmup=2",
        "epochs=0.05",
        "validation.tokens=300",
        "training.lengths=[{until: 0.7, length: 8}]",
    ]
    changes += ["steps.shared_longer.train.epochs=0.1"]
    for mixture in ("mixture", "owners_mixture"):
        changes += [f"steps.{mixture}.train.epochs=0.05", f"steps.{mixture}.train.warmup=2"]
    changes += [f"models.one.{key}" for key in ("width=32", "context=32", "stages[0].block.layers=1")]
    assert main(["train", recipe, *changes, "--device", "cpu"]) == 0
    table = (tmp_path / "out/tables/bits-per-byte.csv").read_text()
    rows = {row["model"]: row for row in csv.DictReader(table.splitlines())}
    assert set(rows) == {*alike, "mixture", "owners_mixture", "owners", "owners_judged", "owners_student"}
    assert all(row["report half"] for row in rows.values())
