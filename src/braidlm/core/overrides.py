"""Overrides of a recipe's keys: as Hydra needs them, and what those name that a recipe does not have."""

import re
from typing import Any, NamedTuple

from braidlm.core.errors import did_you_mean

_OVERRIDE = re.compile(r"^(\+{1,2}|~)?([A-Za-z_][\w.\[\]-]*)(=.*)?$", re.DOTALL)
_INDEX, _DOTTED = re.compile(r"\[(\d+)\]"), r".\1"


class _Override(NamedTuple):
    """An override of a key; choices of a defaults group (`models@model=...`) are none."""

    sign: str
    """`+`, `++`, `~` or nothing."""
    key: str
    """As Hydra writes it: `stages.2` where our errors write `stages[2]`."""
    value: str
    """With its `=`, or nothing."""

    @property
    def removes(self) -> bool:
        return self.sign == "~"


def _parsed(override: str) -> _Override | None:
    match = _OVERRIDE.match(override)
    return match and _Override(match[1] or "", _INDEX.sub(_DOTTED, match[2]), match[3] or "")


def as_hydra(override: str) -> str:
    """An override in Hydra's grammar; `key=value` may set what the file leaves to its default.

    Strict decoding then finds misspelled keys. Hydra would refuse such a key and advise `+key`, which it then accepts
    whatever the spelling.
    """
    parsed = _parsed(override)
    if parsed is None:
        return override
    sign = "++" if not parsed.sign and parsed.value else parsed.sign
    return f"{sign}{parsed.key}{parsed.value}"


def changed_key(override: str) -> str | None:
    """The key that an override sets or removes; None where it chooses or adds a part of a defaults list."""
    parsed = _parsed(override)
    return None if parsed is None or parsed.sign == "+" else parsed.key


def quoted(text: str) -> str:
    """A text as a quoted value in Hydra's override grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def needs_what_it_names(override: str) -> bool:
    """Whether an override can be refused because of what the recipe has: `~key` removes, `list[2]` is an element."""
    parsed = _parsed(override)
    return parsed is not None and (parsed.removes or any(step.isdigit() for step in parsed.key.split(".")))


def missing(override: str, recipe: Any) -> str | None:
    """What the override names and the recipe does not have, with the nearest name; None where it has it all."""
    parsed = _parsed(override)
    if parsed is None:
        return None
    named = override.partition("=")[0] if parsed.removes else override  # Hydra's sweeps write ~key=null
    node, where, steps = recipe, "", parsed.key.split(".")
    for at, step in enumerate(steps):
        is_last = at + 1 == len(steps)
        if isinstance(node, dict):
            children = {str(key): value for key, value in node.items()}
            if step not in children:
                inside = f" in '{where}'" if where else ""
                problem = f"{named}: there is no key '{step}'{inside}.{did_you_mean(step, children)}"
                return problem if parsed.removes else None  # others make the key
            node, where = children[step], f"{where}.{step}" if where else step
        elif isinstance(node, list):
            if not step.isdigit() or int(step) >= len(node):
                return f"{named}: '{where}' is a list of {len(node)} and has no [{step}]"
            if is_last and parsed.removes:
                return f"{named}: an element of a list cannot be removed; write the list anew: {where}=[...]"
            node, where = node[int(step)], f"{where}[{step}]"
        elif parsed.removes:
            return f"{named}: '{where}' is {node!r} and has no keys"
        else:
            return None
    return None
