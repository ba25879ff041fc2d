"""What differs between two trees of plain data, in words."""

from typing import Any


def changes(before: Any, now: Any, where: str = "") -> list[str]:
    """What differs between two trees of plain data, by path."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [c for k in keys for c in changes(before.get(k), now.get(k), f"{where}.{k}" if where else str(k))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [c for i, (a, b) in pairs for c in changes(a, b, f"{where}[{i}]")]
    return [] if before == now else [f"{where} was {_told(before)} and is {_told(now)}"]


def listed(problems: list[str], most: int = 5) -> str:
    """The first few of many."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _told(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
