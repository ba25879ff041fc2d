"""All that Braid replaces in Hydra and OmegaConf, so that a stranger's recipe can be read safely and soon.

Each replacement reaches into these packages as they are in the versions of `WRITTEN_FOR`, which a test compares with
those that are installed.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, _utils
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError
from omegaconf.resolvers import oc

from braidlm.core.errors import BraidError
from braidlm.core.reading import MAX_YAML_BYTES, FastLoader, check_yaml, read_text

WRITTEN_FOR = {"hydra-core": "1.3", "omegaconf": "2.3"}
ALLOW_ENVIRONMENT = "BRAID_ALLOW_ENV"
"""The environment variable that lets recipes read others."""
MAX_INTERPOLATIONS = 2000
"""How often `${...}` is resolved while a recipe is composed."""


@contextmanager
def hydra_in(folder: Path, keys: set[str]) -> Iterator[None]:
    """Let Hydra read the recipes of a folder, each checked before.

    A folder there with the name of one of the `keys`, such as `out`, is no group of recipes that the key chooses from.
    """
    hasten_omegaconf()
    Plugins.instance()  # registers Hydra's own classes
    # The registry keeps Hydra's class, which is changed: launchers send the registry to their jobs, which compare it.
    _check_files(SourcesRegistry.instance().types["file"])  # type: ignore[arg-type]
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        repository: Any = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
        is_group = repository.group_exists
        repository.group_exists = lambda config_path: config_path not in keys and is_group(config_path)
        yield


def compose_quickly(stem: str, overrides: list[str]) -> Any:
    """What Hydra composes, without the settings of its launcher, sweeper, logging and help: they take half of the time
    of composing, and nothing of them is in the result."""
    stored = ConfigStore.instance().repo["hydra"]["config.yaml"]
    whole = stored.node
    stored.node = whole.copy()
    stored.node.defaults = ["_self_"]
    try:
        return compose(stem, overrides=overrides)
    except ConfigCompositionException:  # an override or a defaults list may name one of the groups
        stored.node = whole
        return compose(stem, overrides=overrides)
    finally:
        stored.node = whole


def _check_files(source: type[FileConfigSource]) -> None:
    """Let Hydra's source of files read one, also one that a defaults list names, only after it is checked."""
    load = source.load_config

    def load_checked(self: FileConfigSource, config_path: str) -> ConfigResult:
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        text = read_text(file, MAX_YAML_BYTES) if os.path.exists(file) else ""
        check_yaml(text, file)
        try:
            loaded = load(self, config_path)
        except yaml.YAMLError:
            yaml.load(text, Loader=hasten_omegaconf())  # whose message shows the line
            raise
        if "hydra" in loaded.config:
            todo = "Give Hydra's own settings on the command line: hydra.KEY=VALUE."
            raise BraidError("a recipe cannot configure Hydra, which would run what it names", file, todo)
        return loaded

    if load.__module__ != __name__:  # it is not done yet
        source.load_config = load_checked  # type: ignore[method-assign]


@functools.cache
def hasten_omegaconf() -> Any:
    """Let OmegaConf read YAML by libyaml, and make the class that does so once instead of for every file.

    Returns OmegaConf's own class.
    """
    own = _utils.get_yaml_loader()
    fast = own if FastLoader is yaml.SafeLoader else type("FastOmegaConfLoader", (FastLoader, own), {})
    _utils.get_yaml_loader = lambda: fast
    return own


@contextmanager
def recorded_environment() -> Iterator[list[str]]:
    """Record the variables that `${oc.env:NAME}` names, and give the recipe an empty text, unless that is allowed."""
    variables: list[str] = []

    def record(name: str, default: str | None = None) -> str:
        variables.append(name)
        return ""

    if os.environ.get(ALLOW_ENVIRONMENT) == "1":
        yield variables
        return
    OmegaConf.register_new_resolver("oc.env", record, replace=True)
    try:
        yield variables
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


@contextmanager
def bounded_interpolation() -> Iterator[None]:
    """Refuse interpolations without end: OmegaConf resolves `${b}` anew at each use, so that a value which names
    another twice, which names another twice, and so on, takes hours after twenty lines."""
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
