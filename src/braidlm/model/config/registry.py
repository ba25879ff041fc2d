"""Named parts of one kind: how a word in a configuration becomes a class."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Registry:
    """Names for parts of one kind. A part is a class with its own `Config` dataclass, or a plain typed function."""

    noun: str
    parts: dict[str, Any] = field(default_factory=dict)
    third_party: bool = False
    """Whether other packages may add to it, as they may to the model's parts."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a part under `name`; a name taken twice is our bug, not a user's."""

        def file(part: T) -> T:
            if name in self.parts:
                raise RuntimeError(f"two parts of kind '{self.noun}' are called '{name}'")
            self.parts[name] = part
            return part

        return file

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise BraidError(
                f"unknown {self.noun} '{name}'.{did_you_mean(name, self.parts)}",
                todo=ADVICE if self.third_party else None,
            )
        return self.parts[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.parts and self.third_party:
            _load_third_party_parts()
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        if self.third_party:
            _load_third_party_parts()
        return iter(sorted(self.parts))

    def build(self, choice: Choice, *args: Any, **kwargs: Any) -> Any:
        """Make the chosen part."""
        return self[choice.kind](choice.options, *args, **kwargs)


_third_party_loaded = False


def _load_third_party_parts() -> None:
    """Import other packages' parts once, and only when a name is not ours or all names are asked for."""
    global _third_party_loaded
    if _third_party_loaded:
        return
    _third_party_loaded = True  # before the imports, which may come back here
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # anything may go wrong in another package
            _third_party_loaded = False
            raise BraidError(
                f"the parts of another package cannot be loaded ({type(error).__name__}: {error})",
                f"entry point '{entry.name}' ({entry.value})",
                "Mend, update or uninstall that package.",
            ) from error


def import_files(package: str) -> None:
    """Import every file below a package, so that a new file there is found without a list to edit."""
    for found in walk_packages(import_module(package).__path__, f"{package}."):
        import_module(found.name)
