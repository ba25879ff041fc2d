"""An account as a table for people: tensors of one kind in one line, numbers of layers written as *."""

import re
from collections.abc import Iterable, Mapping, Sequence

from braidlm.edits.account import Account, Fresh, Part

Row = tuple[str, str, tuple[str, ...]]
"""Of a line: the tensors made, how, and the tensors they are made of."""


def account_table(account: Account, paths: Sequence[str]) -> list[str]:
    """The lines of the table, the tensors that are left out last."""
    times: dict[Row, int] = {}
    sources: dict[Row, dict[str, dict[str, None]]] = {}

    def count(made: str, how: str, parts: Iterable[Part]) -> None:
        patterns = [(_pattern(part.tensor, (), "stages", "layers"), part.source) for part in parts]
        row = (made, how, tuple(dict.fromkeys(pattern for pattern, _ in patterns)))
        times[row] = times.get(row, 0) + 1
        for pattern, source in patterns:
            sources.setdefault(row, {}).setdefault(pattern, {})[source] = None

    for name, origin in account.made.items():
        if isinstance(origin, Fresh):
            count(f"{_pattern(origin.module, (), 'layers')}.*", origin.what, ())
        else:
            count(_pattern(name, paths, "layers", "stack"), origin.manner, origin.parts)
    for part, why in account.left_out.items():
        count("-", f"left out: {why}", (part,))
    lines = [[str(number), row[0], _told(sources.get(row, {})), row[1]] for row, number in times.items()]
    return columns([["times", "tensor", "from", "how"], *lines])


def _told(sources: Mapping[str, Iterable[str]]) -> str:
    """`stories, maths: model.embedding.weight`."""
    return " + ".join(f"{', '.join(who)}: {what}" for what, who in sources.items()) or "fresh"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _pattern(name: str, paths: Sequence[str], *numbered: str) -> str:
    """A tensor's name with * for the numbers below these words, and for a path's name and the number of its block."""
    for word in numbered:
        name = re.sub(rf"(?<=\b{word}\.)\d+", "*", name)
    if paths:
        name = re.sub(rf"(?<=\.paths\.)({'|'.join(map(re.escape, paths))})\.\d+", "*.*", name)
    return name
