"""Registries of parts: each maps the names of one kind of part in a configuration to classes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages
from typing import Any, TypeVar

from ..errors import BraidError, did_you_mean

T = TypeVar("T")
ENTRY_POINTS = "braidlm.parts"
ADVICE = f"A part of another package needs that package installed (entry point '{ENTRY_POINTS}')."


@dataclass(frozen=True)
class Choice:
    """A decoded choice of one part: its registered name and its own configuration."""

    kind: str
    options: Any


@dataclass
class NoOptions:
    """The `Config` of a part without options."""


@dataclass(eq=False)
class Registry:
    """The parts of one kind by name. A part is a class with its own `Config` dataclass, or a typed function."""

    noun: str
    parts: dict[str, Any] = field(default_factory=dict)
    third_party: bool = False  # whether other packages may add parts through entry points

    def __post_init__(self) -> None:
        if self.third_party:
            PARTS[self.noun] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a part as `name`; registering a name twice is a bug, not a user's mistake."""

        def add(part: T) -> T:
            if name in self.parts:
                raise RuntimeError(f"two parts of kind '{self.noun}' are called '{name}'")
            self.parts[name] = part
            return part

        return add

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            what = f"unknown {self.noun} '{name}'.{did_you_mean(name, self.parts)}"
            raise BraidError(what, todo=ADVICE if self.third_party else None)
        return self.parts[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.parts and self.third_party:
            _load_own_parts()
            if name not in self.parts:
                _load_third_party_parts()
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        if self.third_party:
            _load_own_parts()
            _load_third_party_parts()
        return iter(sorted(self.parts))

    def build(self, choice: Choice, *args: Any, **kwargs: Any) -> Any:
        """Instantiate the chosen part."""
        return self[choice.kind](choice.options, *args, **kwargs)


PARTS: dict[str, Registry] = {}  # the registries of the model's parts, by noun

_third_party_loaded = False


@cache
def _load_own_parts() -> None:
    """Import every file of the model, which registers its parts; in a saved folder they are all in this file."""
    package = __name__.removesuffix(".config.registry")
    if package != __name__:
        import_files(package)


def _load_third_party_parts() -> None:
    """Import other packages' parts once, and only when a name is unknown or all names are listed."""
    global _third_party_loaded
    if _third_party_loaded:
        return
    _third_party_loaded = True  # set before the imports, which may call this function again
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # anything may go wrong in another package
            _third_party_loaded = False
            what = f"the parts of another package cannot be loaded ({type(error).__name__}: {error})"
            todo = "Fix, update or uninstall that package."
            raise BraidError(what, f"entry point '{entry.name}' ({entry.value})", todo) from error


def import_files(package: str) -> None:
    """Import every file below a package, so that a new file there needs no list to edit."""
    for file in walk_packages(import_module(package).__path__, f"{package}."):
        import_module(file.name)


def inherit(base: Any, own: Any) -> Any:
    """Merge a part's own options into inherited ones; a part of another kind replaces them altogether."""
    base = {"kind": base} if isinstance(base, str) and isinstance(own, dict) else base
    own = {"kind": own} if isinstance(own, str) and isinstance(base, dict) else own
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    if "kind" in own and own["kind"] != base.get("kind", own["kind"]):
        return own
    merged = dict(base)
    for key, value in own.items():
        merged[key] = inherit(base[key], value) if key in base else value
    return merged
