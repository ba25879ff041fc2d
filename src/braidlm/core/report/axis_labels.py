"""Numbers along an axis and names beside lines and points: plain, round and apart."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_GAP = 0.068
"""The smallest distance between two names, as a share of the height."""
NAME_OFFSET = 8.0
"""How far a name stands from its point, in points of text."""
LETTER = 6.0
"""The width of a letter, about, in points of text."""

Spot = tuple[float, float, str]
"""Where a named point is, as shares of the plot's width and height."""


def scale_axis(axis: Any, set_scale: Any, log: bool) -> None:
    """Plain numbers at round values, on a linear or a logarithmic axis."""
    from matplotlib import ticker  # which is optional, and there where something is drawn

    if log:
        set_scale("log", nonpositive="mask")
    low, high = sorted(axis.get_view_interval())
    if log:
        ratio = high / low
        round_values = ticker.LogLocator(subs=(1, 2, 5) if ratio < 400 else (1,), numticks=9)
        # A small range may contain no round power at all.
        axis.set_major_locator(round_values if ratio > 5 else ticker.MaxNLocator(6))
        axis.set_minor_locator(ticker.NullLocator())
    if log or max(abs(low), abs(high)) >= 2000:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))
    else:
        plain = ticker.ScalarFormatter(useOffset=False)
        plain.set_scientific(False)
        axis.set_major_formatter(plain)


def _short(value: float) -> str:
    """2000 as 2k, 1.5e6 as 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def name_at_the_edge(axes: "Axes", names: Sequence[tuple[str, float, str]]) -> None:
    """Write each name at the right of the plot, at its height, moved apart where two would overlap."""
    to_share = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    labels = sorted(((float(to_share.transform((x, y))[1]), name, colour) for name, y, colour in names))
    for (_, name, colour), height in zip(labels, spread([label[0] for label in labels], LABEL_GAP), strict=True):
        axes.annotate(name, (1, height), (6, 0), "axes fraction", "offset points", color=colour, va="center")


def name_points(axes: "Axes", points: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """Write each name at the right of its point; those that would overlap are stacked, with lines to their points."""
    to_share = axes.transData + axes.transAxes.inverted()
    plot = axes.get_window_extent()
    pixels = axes.figure.dpi / 72  # of a point of text
    shares = ((name, to_share.transform(point)) for name, point in points.items())
    spots: list[Spot] = [(float(x), float(y), name) for name, (x, y) in shares]
    widths = [(NAME_OFFSET + LETTER * len(name)) * pixels / plot.width for name in points]
    columns: list[list[Spot]] = []  # of names that would overlap if they stood at one height
    end = -math.inf
    for spot, width in sorted(zip(spots, widths, strict=True)):
        if spot[0] > end:
            columns.append([])
        columns[-1].append(spot)
        end = max(end, spot[0] + width)
    for column in columns:
        column.sort(key=lambda spot: spot[1])
        heights = spread([y for _, y, _ in column], LABEL_GAP)
        # Heights outside the plot are moved into it, and still rise by at least the gap.
        heights = [max(height, LABEL_GAP * (at + 0.5)) for at, height in enumerate(heights)]
        heights = [min(height, 1 - LABEL_GAP * (len(heights) - at - 0.5)) for at, height in enumerate(heights)]
        stacked = [sum(abs(height - other) < 1.01 * LABEL_GAP for other in heights) > 1 for height in heights]
        aside = max((x for (x, _, _), is_stacked in zip(column, stacked, strict=True) if is_stacked), default=0.0)
        for (x, y, name), height, is_stacked in zip(column, heights, stacked, strict=True):
            colour, right = colours[name], NAME_OFFSET
            if is_stacked:
                right += NAME_OFFSET + (aside - x) * plot.width / pixels
            axes.annotate(
                name,
                (x, y),
                (right, (height - y) * plot.height / pixels),
                "axes fraction",
                "offset points",
                {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)} if is_stacked else None,
                color=colour,
                va="center",
            )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights with at least `gap` between neighbours; each group of close ones keeps its mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) - _bottom(groups[-2], gap) < gap * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + gap * at for group in groups for at in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2
