"""Numbers along an axis and names beside lines and points: plain, round and apart."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from braidlm.core.report.figure_style import load_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_GAP = 0.068
"""The smallest distance between two names, as a share of the height."""


def scale_axis(axis: Any, set_scale: Any, log: bool) -> None:
    """Plain numbers at round values, on a linear or a logarithmic axis."""
    ticker = load_matplotlib().ticker
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
    """Write each name at the right of its point, moved apart where two would overlap."""
    to_share = axes.transData + axes.transAxes.inverted()
    spots = sorted((*reversed(to_share.transform(point)), name) for name, point in points.items())
    heights = spread([float(height) for height, _, _ in spots], LABEL_GAP)
    for (_, x, name), height in zip(spots, heights, strict=True):
        axes.annotate(name, (x, height), (8, 0), "axes fraction", "offset points", color=colours[name], va="center")


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights with at least `gap` between neighbours; each group of close ones keeps its mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) - _top(groups[-2], gap) < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + gap * at for group in groups for at in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)
