"""The data of a chart: as charts.js draws it, and as a table for those who read it without a browser's scripts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any

from braidlm.core.report.report import Bars, Chart, HeatMaps, Lines, Points, StackedShares, Table

KINDS: dict[type[Chart], str] = {
    Lines: "lines",
    Points: "points",
    Bars: "bars",
    StackedShares: "shares",
    HeatMaps: "heat",
}
MAX_ROWS = 24
"""A table of lines has at most so many of their points, evenly chosen."""


def chart_data(chart: Chart) -> dict[str, Any]:
    """The fields of a chart and its kind, as plain JSON."""
    data = asdict(chart)
    if isinstance(chart, StackedShares):  # no list can be a key
        data["panels"] = {panel: [(*row, of) for row, of in rows.items()] for panel, rows in chart.panels.items()}
    return {"kind": KINDS[type(chart)], **_plain(data)}


def _plain(value: Any) -> Any:
    """A value as JSON has it: what is not finite is null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Real):
        return float(f"{float(value):.9g}") if math.isfinite(value) else None
    return [_plain(each) for each in value]


def chart_table(chart: Chart) -> Table:
    """The values of a chart."""
    match chart:
        case Lines(series, x_label):
            columns: dict[str, dict[float, float | None]] = {}
            for name, (xs, ys) in series.items():
                columns[name] = dict(zip(xs, ys, strict=True))
                if name in chart.errors:
                    columns[f"{name}, standard error"] = dict(zip(xs, chart.errors[name], strict=True))
            every = sorted({x for own in columns.values() for x in own})
            step = -(-len(every) // MAX_ROWS)
            chosen = [*every[:-1:step], every[-1]] if every else []
            rows = [[x, *(own.get(x) for own in columns.values())] for x in chosen]
            caption = f"{len(rows)} of {len(every)} points." if len(rows) < len(every) else ""
            return _table([x_label or "x", *columns], rows, caption)
        case Points(points, x_label, y_label):
            return _table(["", x_label or "x", y_label or "y"], ([name, *point] for name, point in points.items()))
        case Bars(values, label):
            grouped = {group: of if isinstance(of, Mapping) else {"": of} for group, of in values.items()}
            return _table(["", "", label], ([g, name, v] for g, own in grouped.items() for name, v in own.items()))
        case StackedShares(panels, names):
            shares = ((panel, *row, of) for panel, rows in panels.items() for row, of in rows.items())
            return _table(["", "", "", *names], ([*row, *(of.get(name) for name in names)] for *row, of in shares))
        case HeatMaps(maps, scale):
            cells = (
                [one.title, row, column, value]
                for line in maps
                for one in line
                for row, numbers in zip(one.rows, one.values, strict=True)
                for column, value in zip(one.columns, numbers, strict=True)
            )
            return _table(["", "", "", scale], cells)


def _table(columns: list[str], rows: Iterable[list[Any]], caption: str = "") -> Table:
    """A table without columns that are empty throughout."""
    rows = [[_plain(value) for value in row] for row in rows]
    used = [at for at in range(len(columns)) if columns[at] or any(row[at] != "" for row in rows)]
    return Table([columns[at] for at in used], [[row[at] for at in used] for row in rows], caption)
