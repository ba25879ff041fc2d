"""How two trees of plain data differ, as a recipe would have it: `training.batch: 8 -> 16`."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import yaml

from braidlm.core.differences import shown

MAX_CHANGES = 12
"""Lines of an error."""


def changes(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Every key that differs, with both values; null where one has none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from changes(before.get(key), now.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(before, list) and isinstance(now, list):
        for index, (old, new) in enumerate(zip_longest(before, now)):
            yield from changes(old, new, f"{where}[{index}]")
    elif before != now:
        yield f"{where}: {as_yaml(before)} -> {as_yaml(now)}"


def as_yaml(value: Any) -> str:
    """A value as a recipe has it, in one line; of a whole section its beginning, without keys that are null."""
    given = {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value
    text = yaml.safe_dump(given, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    line = text.removesuffix("\n").removesuffix("\n...")
    return shown(line) if isinstance(value, (dict, list)) else line


def with_changes(what: str, changed: Sequence[str]) -> str:
    """An error and below it what differs, a line each; of many the first."""
    more = [f"and {len(changed) - MAX_CHANGES} more"] if len(changed) > MAX_CHANGES else []
    return "\n  ".join([f"{what}:", *changed[:MAX_CHANGES], *more])
