"""Recipes: found by name, composed with defaults and overrides, and clear about what is wrong."""

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, _utils
from omegaconf.base import Container

from braidlm.core import recipes
from braidlm.core.errors import BraidError
from braidlm.core.hydra_changes import WRITTEN_FOR, hasten_omegaconf
from braidlm.core.reading import FastLoader
from braidlm.core.recipes import compose_recipe, find_recipe, hydra_overrides, list_recipes, recipe_root, resolved
from braidlm.model.config.braid_config import read_architecture

FILES = {
    "models/small.yaml": "# A small model\nwidth: 8\nstages:\n  - block: {layers: 2}\n  - block\n",
    "models/large.yaml": "width: 64\nstages: [block]\n",
    "tiny/gpt2.yaml": (
        "# GPT-2, tiny\ndefaults:\n  - /models/small@model\n  - _self_\n\n"
        "model:\n  context: 16\nsteps: 10\nlabel: ${model.width} wide\n"
    ),
}


@pytest.fixture(params=["recipes", "my recipes, (new) it's"])
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder of recipes in place of Braid's own, also under a name with signs that mean something to Hydra."""
    folder = tmp_path / request.param
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(recipes, "recipe_root", lambda: folder)
    return folder


def refused(name: str | Path, *overrides: str) -> str:
    with pytest.raises(BraidError) as caught:
        compose_recipe(str(name), list(overrides))
    return str(caught.value)


def written(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_recipes_are_listed_with_their_first_line(root: Path) -> None:
    assert list_recipes() == [
        ("models/large", "width: 64"),
        ("models/small", "A small model"),
        ("tiny/gpt2", "GPT-2, tiny"),
    ]


def test_a_recipe_is_found_by_name_and_by_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_recipe("tiny/gpt2") == root / "tiny" / "gpt2.yaml"
    assert find_recipe(str(root / "tiny" / "gpt2.yaml")) == root / "tiny" / "gpt2.yaml"
    monkeypatch.chdir(root / "tiny")
    assert find_recipe("gpt2.yaml") == root / "tiny" / "gpt2.yaml"


def test_an_unknown_recipe_is_answered_with_the_nearest(root: Path) -> None:
    with pytest.raises(BraidError) as caught:
        find_recipe("tiny/gtp2")
    assert str(caught.value) == (
        "there is no recipe 'tiny/gtp2'. Did you mean 'tiny/gpt2'?\n"
        "`braid list recipes` shows those that come with Braid; a recipe of your own is given as FILE.yaml."
    )
    with pytest.raises(BraidError, match=r"no/such\.yaml: this file does not exist"):
        find_recipe("no/such.yaml")
    with pytest.raises(BraidError, match=r"a recipe file ends in \.yaml"):
        find_recipe(str(written(root, "a: 1", "mine.yml")))
    (root / "circle").symlink_to(root / "circle")
    with pytest.raises(BraidError, match="circle: these links lead in a circle"):
        find_recipe(str(root / "circle"))


def test_defaults_are_followed_and_interpolations_resolved(root: Path) -> None:
    assert compose_recipe("tiny/gpt2") == {
        "model": {"width": 8, "stages": [{"block": {"layers": 2}}, "block"], "context": 16},
        "steps": 10,
        "label": "8 wide",
    }


def test_a_recipe_reads_the_environment_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    path = written(tmp_path, "name: ${oc.env:SECRET_TOKEN}\nother: [{deep: 'x${oc.env:HOME,none}'}]\n")
    answer = refused(path)
    assert "this recipe reads the environment: SECRET_TOKEN, HOME" in answer
    assert "Set BRAID_ALLOW_ENV=1 if you trust it." in answer
    assert "s3cret" not in answer
    named = written(tmp_path, "defaults: ['${oc.env:SECRET_TOKEN}']\n", "defaults.yaml")
    assert "s3cret" not in refused(named)
    plain = written(tmp_path, "a: 1", "plain.yaml")
    assert "reads the environment: SECRET_TOKEN" in refused(plain, "b=${oc.env:SECRET_TOKEN}")
    monkeypatch.setenv("BRAID_ALLOW_ENV", "1")
    assert compose_recipe(str(path))["name"] == "s3cret"
    assert OmegaConf.create({"a": "${oc.env:SECRET_TOKEN}"}).a == "s3cret", "elsewhere it is as it was"


def test_a_recipe_outside_finds_braids_own_parts(root: Path, tmp_path: Path) -> None:
    path = written(tmp_path, "defaults:\n  - /models/large@model\n  - _self_\nmodel: {context: 4}\n")
    assert compose_recipe(str(path)) == {"model": {"width": 64, "stages": ["block"], "context": 4}}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=3", ["steps"], 3),
        ("model.width=32", ["model", "width"], 32),
        ("model.context=1e3", ["model", "context"], 1000.0),
        ("model.dropout=0.1", ["model", "dropout"], 0.1),
        ("model.block.norm=layer", ["model", "block", "norm"], "layer"),
        ("model.stages[0].block.layers=5", ["model", "stages", 0, "block", "layers"], 5),
        ("model.stages.0.block.layers=5", ["model", "stages", 0, "block", "layers"], 5),
        ("model.stages=[block,{block: {layers: 3}}]", ["model", "stages"], ["block", {"block": {"layers": 3}}]),
        ("label='a=b'", ["label"], "a=b"),
        ("label='with space, and comma'", ["label"], "with space, and comma"),
        ("label=null", ["label"], None),
        ("+extra.deep=1", ["extra", "deep"], 1),
        ("++steps=4", ["steps"], 4),
    ],
)
def test_an_override_sets_a_value(root: Path, override: str, path: list[Any], value: Any) -> None:
    found: Any = compose_recipe("tiny/gpt2", [override])
    for step in path:
        found = found[step]
    assert found == value


def test_overrides_keep_what_stands_beside_them(root: Path) -> None:
    model = compose_recipe("tiny/gpt2", ["model.width=32", "~steps"])["model"]
    assert model["context"] == 16
    assert "steps" not in compose_recipe("tiny/gpt2", ["~steps"])


def test_another_choice_from_the_defaults(root: Path) -> None:
    text = "defaults:\n  - /models@model: small\n  - _self_\n"
    path = written(root, text)
    assert compose_recipe(str(path))["model"]["width"] == 8
    assert compose_recipe(str(path), ["models@model=large"])["model"]["width"] == 64


@pytest.mark.parametrize("override", ["out=out", "++out=out", "~out"])
def test_a_folder_with_the_name_of_a_key_is_no_group(tmp_path: Path, override: str) -> None:
    """As the folder of a run that goes on, beside its recipe."""
    path = written(tmp_path, "out: runs\nsteps: 3\n")
    before = compose_recipe(str(path), [override])
    assert before == ({"steps": 3} if override == "~out" else {"out": "out", "steps": 3})
    (tmp_path / "out").mkdir()
    assert compose_recipe(str(path), [override]) == before


def test_a_misspelled_override_is_found_by_strict_decoding(root: Path) -> None:
    data = compose_recipe("tiny/gpt2", ["model.widht=32", "model.stages[0].block.layer=3"])
    with pytest.raises(BraidError) as caught:
        read_architecture(data["model"])
    assert "model: unknown key 'widht'. Did you mean 'width'?" in str(caught.value)
    assert "model.stages[0].block: unknown key 'layer'. Did you mean 'layers'?" in str(caught.value)


@pytest.mark.parametrize("override", ["steps", "=3", "+steps=3", "~models@model"])
def test_an_override_that_cannot_be_applied_is_shown(root: Path, override: str) -> None:
    text = refused("tiny/gpt2", override)
    assert text.startswith(f"{root / 'tiny' / 'gpt2.yaml'}: this recipe cannot be composed: ")
    assert text.endswith(f"\nOverrides are written key=value, or ~key to remove one; given were: {override}")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("~no.such.key", "there is no key 'no'. There are: label, model, steps."),
        ("~model.widht", "there is no key 'widht' in 'model'. Did you mean 'width'?"),
        ("~model.stages[0].blok", "there is no key 'blok' in 'model.stages[0]'. Did you mean 'block'?"),
        ("~steps.more", "'steps' is 10 and has no keys"),
        ("~model.stages[0]", "an element of a list cannot be removed; write the list anew: model.stages=[...]"),
        ("~model.stages[2]", "'model.stages' is a list of 2 and has no [2]"),
        ("model.stages[9].block=1", "'model.stages' is a list of 2 and has no [9]"),
    ],
)
def test_an_override_of_what_is_not_there_names_what_is(root: Path, override: str, problem: str) -> None:
    assert refused("tiny/gpt2", override) == f"{root / 'tiny' / 'gpt2.yaml'}: {override}: {problem}"


def test_what_is_removed_is_named_without_its_value(root: Path) -> None:
    assert ": ~model.widht: there is no key" in refused("tiny/gpt2", "~model.widht=null")


def test_all_overrides_of_what_is_not_there_are_told_at_once(root: Path) -> None:
    text = refused("tiny/gpt2", "~stepz", "model.width=4", "~model.widht", "~steps")
    assert [line.rsplit(": ", 1)[1] for line in text.split("\n")] == [
        "there is no key 'stepz'. Did you mean 'steps'?",
        "there is no key 'widht' in 'model'. Did you mean 'width'?",
    ]


def test_a_key_inside_of_a_list_is_removed(root: Path) -> None:
    data = compose_recipe("tiny/gpt2", ["~model.stages[0].block.layers"])
    assert data["model"]["stages"] == [{"block": {}}, "block"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [1\nb: 2\n", "this is not valid YAML: while parsing a flow sequence"),
        ("a: {b: 1}}\n", "this is not valid YAML: "),
        (b"a: \xff\xfe\n", "this is not UTF-8 text (invalid start byte at byte 3)"),
        ("a: 1\na: 2\n", "found duplicate key a"),
        ("- 1\n- 2\n", "this recipe cannot be composed: "),
        ("a: ${nowhere}\n", "this recipe cannot be composed: Interpolation key 'nowhere' not found"),
        ("a: ???\n", "this recipe cannot be composed: Missing mandatory value: a"),
        ("defaults:\n  - /models/nope@model\n", "Could not load 'models/nope'"),
        ("defaults: [mine]\n", "its defaults lists or interpolations lead in a circle"),
        ("defaults: 3\n", "defaults must be a list"),
        ("hydra: null\n", "a recipe cannot configure Hydra"),
        ("hydra: {callbacks: {run: {_target_: os.abort}}}\n", "a recipe cannot configure Hydra"),
        ("42\n", "this recipe cannot be composed: "),
        ("a: " + "[" * 200 + "]" * 200, "this YAML is nested more than 100 levels deep"),
        ("a: !!python/object/apply:os.abort []\n", "could not determine a constructor"),
        ("a: !!set {x}\n", "this recipe cannot be composed: Value 'set' is not a supported"),
        ("a: '${oc.create:'\n", "this recipe cannot be composed: mismatched"),
        ("".join(f"a{i}: '${{a{i + 1}}}${{a{i + 1}}}'\n" for i in range(20)) + "a20: x\n", "more than 2,000 interpol"),
    ],
)
def test_a_broken_recipe_is_named(root: Path, tmp_path: Path, content: str | bytes, text: str) -> None:
    path = written(tmp_path, content)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert text in message


def test_an_empty_recipe_is_empty(root: Path, tmp_path: Path) -> None:
    assert compose_recipe(str(written(tmp_path, ""))) == {}


def test_composing_twice_and_after_an_error_works(root: Path, tmp_path: Path) -> None:
    refused(written(tmp_path, "a: [1\n"))
    assert compose_recipe("tiny/gpt2") == compose_recipe("tiny/gpt2")


@pytest.mark.parametrize("override", ["steps=3", "hydra.job.name=mine", "hydra/launcher=basic"])
def test_hydras_own_settings_may_be_named_and_change_nothing(root: Path, override: str) -> None:
    """They are left out of composing, unless an override names one of their groups."""
    composed = compose_recipe("tiny/gpt2", [override])
    with initialize_config_dir(config_dir=str(root / "tiny"), version_base="1.3"):
        assert composed == resolved(compose("gpt2", overrides=hydra_overrides([override])))


def test_a_recipe_may_choose_in_a_group_of_hydras_own(root: Path) -> None:
    (root / "tiny" / "own.yaml").write_text("defaults: [gpt2, override /hydra/job_logging: none, _self_]\nsteps: 4\n")
    assert compose_recipe("tiny/own")["steps"] == 4


def test_a_key_that_stands_twice_is_shown_with_its_line(root: Path) -> None:
    (root / "tiny" / "twice.yaml").write_text("width: 1\nwidth: 2\n")
    assert "found duplicate key width" in refused("tiny/twice")
    assert "width: 2\n" in refused("tiny/twice")


def test_hydra_is_the_version_that_braid_was_written_for() -> None:
    """`core/hydra_changes.py` replaces parts of it: another version needs that file to be read again."""
    for package, version in WRITTEN_FOR.items():
        installed = importlib.metadata.version(package)
        assert installed.startswith(f"{version}."), f"{package} {installed}: read core/hydra_changes.py beside it"


def test_what_is_replaced_in_hydra_is_put_back(root: Path) -> None:
    resolve, store = Container.resolve_parse_tree, ConfigStore.instance().repo["hydra"]["config.yaml"].node
    compose_recipe("tiny/gpt2")
    refused(written(root, "a: ${nowhere}\n"))
    assert Container.resolve_parse_tree is resolve
    assert ConfigStore.instance().repo["hydra"]["config.yaml"].node is store
    assert not GlobalHydra.instance().is_initialized()


def test_libyaml_reads_what_pyyaml_reads() -> None:
    slow, fast = hasten_omegaconf(), _utils.get_yaml_loader()
    for name, _ in list_recipes():
        text = find_recipe(name).read_text()
        assert yaml.load(text, Loader=fast) == yaml.load(text, Loader=slow), name
        assert yaml.load(text, Loader=FastLoader) == yaml.safe_load(text), name


def test_our_own_recipes_are_found() -> None:
    assert recipe_root().is_dir()


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("läufe", "läufe"),
        ("a (copy)", "a (copy)"),
        ("20k words to 100k, then 100k", "20k words to 100k, then 100k"),
        ("[block:{layers:4}]", [{"block": {"layers": 4}}]),
        ("[ä, {b: 1.5, c: null, d: true}]", ["ä", {"b": 1.5, "c": None, "d": True}]),
        ("it's", "it's"),
        ("a=b", "a=b"),
        ("'ä, b'", "ä, b"),
    ],
)
def test_values_of_the_command_line_are_yaml(root: Path, given: str, value: Any) -> None:
    assert compose_recipe("tiny/gpt2", [f"label={given}"])["label"] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "steps=0,003",
            "steps: 0,003 are several values, which `braid train --multirun` takes\nA decimal number has a",
        ),
        ("steps=range(1,3)", "several values, which `braid train --multirun` takes"),
        ("steps=[1", "steps: this is not YAML: [1"),
        ("label='x", "label: this is not YAML: 'x\nWrite a text in quotes of its own: 'label=\"...\"'"),
        ("label=a #b", "after '#' YAML has a comment"),
        ("label={'ä b': 1}", "the key 'ä b' cannot stand on the command line"),
        ("läufe=3", "läufe: a key of the command line has letters from a to z"),
    ],
)
def test_what_is_no_value_shows_how_to_write_it(root: Path, override: str, message: str) -> None:
    assert message in refused("tiny/gpt2", override)


def test_quoted_texts_are_read_as_they_are() -> None:
    for text in map("".join, itertools.product("a\\'\" ", repeat=3)):
        assert OverridesParser.create().parse_override(f"k={recipes.quoted(text)}").value() == text
