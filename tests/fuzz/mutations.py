"""Changes that damage or a stranger could make: to plain data, to text and to bytes."""

import copy
import json
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: list[Any] = [
    *(None, True, False, [], {}, "", [[]], {"a": 1}, [None], {"": None}),
    *(0, 1, -1, 2, 10**6, 2**31, 2**63, -(2**63) - 1, 10**40),
    *(0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("nan", "1e999", "x" * 300, "a\0b", "\ud800", "../../x", "/", ".", "~nobody/x", "~", "é" * 200),
    *("${a}", "???", "!!python/none", "braid", "bytes", "gpt2", "{}", "[", "%s", "$(true)", "__class__"),
    *(deep(150), [1] * 5000, {str(number): number for number in range(5000)}, ["x", 1, None]),
]
"""Values that do not belong where they are put."""


def seeded(cases: int) -> settings:
    """So many examples, the same every time; none is made smaller, since each failure names its own.

    `BRAID_FUZZ=20 pytest tests/fuzz --hypothesis-seed=7` runs twenty times as many, which that seed chooses.
    """
    from hypothesis import HealthCheck, Phase

    times = float(os.environ.get("BRAID_FUZZ", 1))
    return settings(
        max_examples=max(1, round(cases * times)),
        derandomize=times == 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where each part of plain data stands."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Plain data with one to three places replaced, dropped, wrapped, moved or added to."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        found = places(value)
        path = draw(st.sampled_from(found))
        if not path:
            if draw(st.integers(0, 9)) == 0:  # rarely the whole, after which nothing is left to change
                return draw(st.sampled_from(HOSTILE))
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        how, key = draw(st.sampled_from(["replace", "replace", "drop", "wrap", "other", "add"])), path[-1]
        if how == "replace":
            parent[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        elif how == "drop":
            del parent[key]
        elif how == "wrap":
            parent[key] = draw(st.sampled_from([[parent[key]], {"kind": parent[key]}, [parent[key]] * 2]))
        elif how == "other":
            parent[key] = copy.deepcopy(_at(value, draw(st.sampled_from(found))))
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(["", "kind", "extra", f"{key}s", "_target_"]))] = parent[key]
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes, most: int | None = None) -> bytes:
    """Bytes with one to three of them flipped, cut off, filled in or written over; the first `most` if given."""
    damage = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        end = min(len(damage), len(damage) if most is None else most)
        at = draw(st.integers(0, max(end - 1, 0)))
        how = draw(st.sampled_from(["flip", "flip", "cut", "fill", "zero"]))
        if how == "flip" and damage:
            damage[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del damage[at:]
        elif how == "fill":
            damage[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            damage[at : at + 8] = bytes(8)
    return bytes(damage)


@st.composite
def rewritten(draw: st.DrawFn, text: str) -> bytes:
    """The lines of a text with some dropped, doubled, indented, swapped or given a hostile value."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["drop", "double", "indent", "value", "value", "swap"]))
        if how == "drop" and len(lines) > 1:
            del lines[at]
        elif how == "double":
            lines.insert(at, lines[at])
        elif how == "indent":
            lines[at] = " " * draw(st.integers(1, 5)) + lines[at]
        elif how == "value":
            lines[at] = f"{lines[at].split(':')[0]}: {draw(st.sampled_from(YAML_VALUES))}"
        elif how == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
    return draw(damaged("\n".join(lines).encode())) if draw(st.booleans()) else "\n".join(lines).encode()


YAML_VALUES = [
    *(
        "&a [*a]",
        "*b",
        "!!python/object/apply:os.abort []",
        "!!set {x}",
        "!!binary x",
        "? x",
        "<<: 3",
        "| x",
        "2020-13-41",
    ),
    *(
        "${oc.env:HOME}",
        "${hydra:runtime.cwd}",
        "${name}${name}",
        "${..",
        "${oc.create:[}",
        "[[[[[[",
        "{",
        "@x",
        "`x`",
        "%",
    ),
    *("0o9", "1_0", "0x", ".inf", "-.nan", "~", "yes", "1:30:20", "9" * 5000, "\x07", "\ufeff", "- a", "--- b", "..."),
]


def as_json(value: Any) -> bytes:
    """JSON as Python writes it, hostile values included."""
    return json.dumps(value).encode()


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value
