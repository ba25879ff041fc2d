"""Differences in words: between trees of plain data, such as recipes, and between the tensors of two models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import yaml

Shapes = Mapping[str, tuple[int, ...]]
Differences = dict[str, dict[str, Any]]
"""By the path of a key, the value of each tree; None where it has none."""
MAX_SHOWN = 60
"""Characters of a value."""


def differences(trees: Mapping[str, Any], path: str = "") -> Differences:
    """Every key whose values are not all equal, of named trees of plain data.

    A branch that one of them lacks, or a list of another length, is one difference and not one for each of its leaves.
    """
    values = list(trees.values())
    if all(repr(value) == repr(values[0]) for value in values):
        return {}
    if all(isinstance(value, Mapping) for value in values):
        steps = {key: f"{path}.{key}" if path else str(key) for value in values for key in value}
        branches = {step: {name: tree.get(key) for name, tree in trees.items()} for key, step in steps.items()}
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        positions = range(len(values[0]))
        branches = {f"{path}[{at}]": {name: tree[at] for name, tree in trees.items()} for at in positions}
    else:
        return {path: dict(trees)}
    return {key: found for step, branch in branches.items() for key, found in differences(branch, step).items()}


def shown(value: Any) -> str:
    """A value as a recipe would have it, if it is not too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


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


def compare_shapes(expected: Shapes, stored: Shapes, expectation: str = "expected") -> list[str]:
    """Every tensor that is missing, left over or of another shape."""
    missing = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in stored]
    left_over = [f"left over {name} {list(shape)}" for name, shape in stored.items() if name not in expected]
    misshaped = [
        f"{name} is {list(stored[name])}, {expectation} {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    return missing + left_over + misshaped


def _first(items: Sequence[str], most: int) -> list[str]:
    return [*items[:most], *([f"and {len(items) - most} more"] if len(items) > most else [])]


def with_changes(what: str, changed: Sequence[str]) -> str:
    """An error and below it what differs, a line each; of many the first."""
    return "\n  ".join([f"{what}:", *_first(changed, 12)])


def listed(problems: Sequence[str]) -> str:
    """The first few of a list, and how many more there are."""
    return "; ".join(_first(problems, 5))


def bullet_list(items: Sequence[str]) -> str:
    """The items on lines of their own; a long list is cut so that it does not fill the screen."""
    return "".join(f"\n  - {item}" for item in _first(items, 20))
