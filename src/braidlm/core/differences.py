"""Differences in words: between two trees of plain data, and between the tensors of two models."""

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


def changes(before: Any, now: Any, where: str = "") -> list[str]:
    """Each difference with its path, such as `training.batch was 8 and is 16`."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now}, key=str)
        return [c for k in keys for c in changes(before.get(k), now.get(k), f"{where}.{k}" if where else str(k))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [c for i, (a, b) in pairs for c in changes(a, b, f"{where}[{i}]")]
    return [] if before == now else [f"{where} was {_shortened(before)} and is {_shortened(now)}"]


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


def listed(problems: list[str], max_shown: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    more = f"; and {len(problems) - max_shown} more" if len(problems) > max_shown else ""
    return "; ".join(problems[:max_shown]) + more


def _shortened(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
