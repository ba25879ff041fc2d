"""Recipes: YAML files found by name, composed by Hydra with `key=value` overrides, then decoded strictly elsewhere."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.fast_yaml import hasten_omegaconf
from braidlm.core.overrides import as_hydra, changed_key, missing, needs_what_it_names, quoted
from braidlm.core.reading import MAX_YAML_BYTES, check_yaml, read_bytes, read_text

ALLOW_ENVIRONMENT = "BRAID_ALLOW_ENV"
"""The environment variable that lets recipes read others."""
MAX_INTERPOLATIONS = 2000
"""How often `${...}` is resolved while a recipe is composed."""
_HYDRA_RAISES = (ValueError, TypeError, AttributeError, KeyError, AssertionError, OSError, RecursionError)


def recipe_root() -> Path:
    """The folder of the recipes that come with Braid, in an installed package or in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> list[tuple[str, str]]:
    """Names and first comment lines of the recipes that come with Braid."""
    root = recipe_root()
    recipes = []
    for path in sorted(root.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        recipes.append((str(path.relative_to(root).with_suffix("")), first.lstrip("# ").strip()))
    return recipes


def find_recipe(name: str) -> Path:
    """A recipe by its name (`tiny/gpt2`) or its file."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".yml":
        raise BraidError("a recipe file ends in .yaml; Hydra reads no other", name, "Rename it.")
    if path.suffix == ".yaml":
        if not os.path.lexists(path) and path.parent.is_dir():
            near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.yaml")])
            raise BraidError(f"this file does not exist{near and '.'}{near}", name)
        if not os.path.isfile(path):
            read_bytes(path)  # says what is in its place
        return path.resolve()
    known = recipe_root() / f"{name}.yaml"
    if os.path.isfile(known):
        return known
    raise BraidError(
        f"there is no recipe '{name}'.{did_you_mean(name, [n for n, _ in list_recipes()])}",
        todo="`braid list recipes` shows those that come with Braid; a recipe of your own is given as FILE.yaml.",
    )


def compose_recipe(name: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The recipe as plain data: its defaults lists followed, overrides applied, interpolations resolved."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = find_recipe(name)
    _check_files_that_hydra_reads()
    variables: list[str] = []
    try:
        # A recipe is composed from its own folder, so that it needs no package header; `/models/gpt2@model` in its
        # defaults list is found through the search path.
        with (
            _recorded_environment(variables),
            _bounded_interpolation(),
            hydra_in(path.parent, overrides),
        ):
            data = resolved(_composed(path.stem, hydra_overrides(overrides)))
    except BraidError:
        raise
    except YAMLError as error:
        raise BraidError(f"this is not valid YAML: {error}", str(path)) from error
    # Hydra and OmegaConf raise plain errors of many kinds for values in places where they expect others.
    except (HydraException, OmegaConfBaseException, *_HYDRA_RAISES) as error:
        _check_environment(variables, path)
        _raise_missing(name, overrides or [], path)
        first = (str(error).strip() or str(error.__cause__)).split("\n")[0]
        if isinstance(error, RecursionError):
            first = "its defaults lists or interpolations lead in a circle"
        raise BraidError(f"this recipe cannot be composed: {first}", str(path), _hint(overrides)) from error
    _check_environment(variables, path)
    if not isinstance(data, dict):
        raise BraidError("a recipe is a mapping of keys to values", str(path))
    return {str(key): value for key, value in data.items()}


@contextmanager
def hydra_in(folder: Path, overrides: list[str] | None) -> Iterator[None]:
    """Let Hydra read the recipes of a folder with these overrides.

    A folder there that has the name of a key, as `out` has, is no group of recipes that the key chooses from.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    keys = set(map(changed_key, overrides or []))
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        repository: Any = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
        is_group = repository.group_exists
        repository.group_exists = lambda config_path: config_path not in keys and is_group(config_path)
        yield


def _composed(stem: str, overrides: list[str]) -> Any:
    """What Hydra composes in the folder that it was initialised for."""
    from hydra import compose
    from hydra.errors import ConfigCompositionException

    try:
        with _without_groups_of_hydra():
            return compose(stem, overrides=overrides)
    except ConfigCompositionException:  # an override or a defaults list may name one of the groups
        return compose(stem, overrides=overrides)


@contextmanager
def _without_groups_of_hydra() -> Iterator[None]:
    """Leave out the settings of Hydra's launcher, sweeper, logging and help: they take half of the time of composing,
    and nothing of them is in the result."""
    from hydra.core.config_store import ConfigStore

    stored = ConfigStore.instance().repo["hydra"]["config.yaml"]
    whole = stored.node
    stored.node = whole.copy()
    stored.node.defaults = ["_self_"]
    try:
        yield
    finally:
        stored.node = whole


def resolved(config: Any) -> Any:
    """What Hydra composed as plain data; `${of_width:1/2}` in a model is half of its width."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("of_width", _of_width, replace=True)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _of_width(factor: str | float, *, _parent_: Any) -> int:
    """The width of the model around the key, times `factor`, rounded down to a whole number of at least 1."""
    from omegaconf import DictConfig

    node = _parent_
    while node is not None and not (isinstance(node, DictConfig) and "stages" in node):
        node = node._get_parent()
    if node is None:
        raise ValueError("${of_width:...} stands in a model, which has a `width` and `stages`")
    width = node.get("width")
    # A width that is no number is told once, when the model is decoded, and not for every size that follows from it.
    return max(1, int(width * Fraction(str(factor)))) if isinstance(width, int) else 1


def _check_files_that_hydra_reads() -> None:
    """Let Hydra read each file, also those that defaults lists name, only after it is checked.

    Hydra finds the class that reads files in its registry of plugins.
    """
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from yaml import YAMLError, load

    class CheckedFileSource(FileConfigSource):
        def load_config(self, config_path: str) -> ConfigResult:
            file = os.path.join(self.path, self._normalize_file_name(config_path))
            text = read_text(file, MAX_YAML_BYTES) if os.path.exists(file) else ""
            check_yaml(text, file)
            try:
                loaded = super().load_config(config_path)
            except YAMLError:
                load(text, Loader=hasten_omegaconf())  # whose message shows the line
                raise
            if "hydra" in loaded.config:
                todo = "Give Hydra's own settings on the command line: hydra.KEY=VALUE."
                raise BraidError("a recipe cannot configure Hydra, which would run what it names", file, todo)
            return loaded

    hasten_omegaconf()
    Plugins.instance()  # registers Hydra's own classes
    SourcesRegistry.instance().types["file"] = CheckedFileSource


@contextmanager
def _recorded_environment(variables: list[str]) -> Iterator[None]:
    """Record the variables that `${oc.env:NAME}` names, and give the recipe an empty text, unless that is allowed."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def record(name: str, default: str | None = None) -> str:
        variables.append(name)
        return ""

    if os.environ.get(ALLOW_ENVIRONMENT) == "1":
        yield
        return
    OmegaConf.register_new_resolver("oc.env", record, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


@contextmanager
def _bounded_interpolation() -> Iterator[None]:
    """Refuse interpolations without end: OmegaConf resolves `${b}` anew at each use, so that a value which names
    another twice, which names another twice, and so on, takes hours after twenty lines."""
    from omegaconf.base import Container
    from omegaconf.errors import InterpolationResolutionError

    resolve, count = Container.resolve_parse_tree, 0

    def counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > MAX_INTERPOLATIONS:
            raise InterpolationResolutionError(f"there are more than {MAX_INTERPOLATIONS:,} interpolations to resolve")
        return resolve(self, *args, **kwargs)

    Container.resolve_parse_tree = counted
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve


def _check_environment(variables: list[str], path: Path) -> None:
    """A recipe may be a stranger's, and what it reads is written to files: the environment has tokens and passwords."""
    if variables:
        raise BraidError(
            f"this recipe reads the environment: {', '.join(dict.fromkeys(variables))}",
            str(path),
            f"Set {ALLOW_ENVIRONMENT}=1 if you trust it.",
        )


def hydra_overrides(overrides: list[str] | None) -> list[str]:
    """Overrides as Hydra needs them, with Braid's own recipes in the search path."""
    return [f"hydra.searchpath=[{quoted(f'file://{recipe_root()}')}]", *map(as_hydra, overrides or [])]


def _raise_missing(name: str, overrides: list[str], path: Path) -> None:
    """Tell every key that an override needs and the recipe does not have."""
    kept = [override for override in overrides if not needs_what_it_names(override)]
    if len(kept) < len(overrides):
        recipe = compose_recipe(name, kept)
        if problems := list(filter(None, (missing(override, recipe) for override in overrides))):
            raise BraidError("\n".join(problems), str(path))


def _hint(overrides: list[str] | None) -> str | None:
    if not overrides:
        return None
    return f"Overrides are written key=value, or ~key to remove one; given were: {' '.join(overrides)}"
