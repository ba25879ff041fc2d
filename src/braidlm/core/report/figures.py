"""Charts of lines, points and bars, and figures for pages (SVG that follows light and dark) and documents (PNG).

Lines are named where they end, not in a legend, so that a reader never has to match colours.
"""

import hashlib
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_bytes
from braidlm.core.report.axis_labels import name_at_the_edge, name_points, scale_axis
from braidlm.core.report.figure_style import (
    COLOURS,
    DASHES,
    FONTS,
    INK,
    INK_ON_DARK,
    LEGEND_COLUMNS,
    load_matplotlib,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_serial = itertools.count()


def line_chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    title: str | None = None,
    levels: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    colours: Mapping[str, str] | None = None,
    y_limits: tuple[float, float] | None = None,
) -> "Figure":
    """Named lines, each (xs, ys), and named horizontal levels to compare them with.

    `colours` gives a line the colour it has in other figures too, `y_limits` the scale that they share.
    """
    _check_series(series)
    with styled():
        figure, axes = _axes(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(axis="y")
        axes.margins(x=0.012)
        names: list[tuple[str, float, str]] = []
        drawn: Counter[str] = Counter()
        for index, (name, (xs, ys)) in enumerate(series.items()):
            colour = (colours or {}).get(name, COLOURS[index % len(COLOURS)])
            dashes = DASHES[drawn[colour] % len(DASHES)]  # lines of one colour are told apart by them
            drawn[colour] += 1
            dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(xs) < 20 else {}
            axes.plot(xs, ys, color=colour, linestyle=dashes, **dots)
            ends = [y for y in ys if math.isfinite(y) and (y > 0 or not log_y)]
            if ends:
                names.append((name, ends[-1], colour))
        for name, level in (levels or {}).items():
            axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
            names.append((name, level, INK))
        if y_limits is not None:
            axes.set_ylim(y_limits)
        scale_axis(axes.xaxis, axes.set_xscale, log_x)
        scale_axis(axes.yaxis, axes.set_yscale, log_y)
        name_at_the_edge(axes, names)
    return figure


def point_chart(
    points: Mapping[str, tuple[float, float]],
    x_label: str,
    y_label: str,
    colours: Mapping[str, str] | None = None,
    log: bool = False,
) -> "Figure":
    """Named points, each (x, y) with its name beside it, moved apart where two would overlap.

    `colours` gives a point the colour its name has in other figures; `log` makes both axes logarithmic.
    """
    if not points:
        raise BraidError("there is nothing to draw", "point chart")
    with styled():
        figure, axes = _axes(None)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid()
        axes.margins(x=0.18, y=0.1)  # names need room
        colours = colours or {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(points)}
        for name, (x, y) in points.items():
            axes.plot([x], [y], color=colours[name], marker="o", markersize=6)
        scale_axis(axes.xaxis, axes.set_xscale, log)
        scale_axis(axes.yaxis, axes.set_yscale, log)
        name_points(axes, points, colours)
    return figure


def bar_chart(
    values: Mapping[str, float] | Mapping[str, Mapping[str, float]],
    value_label: str,
    title: str | None = None,
    digits: int = 2,
    highlight: str | None = None,
    colours: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> "Figure":
    """Horizontal bars with their values: {name: value}, or groups of them: {group: {name: value}}.

    `highlight` names the bar (or, in groups, the series) the chart is about; the others are paler. `colours` gives a
    series of groups the colour it has in other figures too; `limit` is where the scale ends, by default at the values.
    """
    grouped = {group: v if isinstance(v, Mapping) else {group: v} for group, v in values.items()}
    in_groups = any(isinstance(v, Mapping) for v in values.values())
    names = list(dict.fromkeys(name for group in (colours or {}, *grouped.values()) for name in group))
    names = [name for name in names if any(name in group for group in grouped.values())]
    if not names:
        raise BraidError("there is nothing to draw", f"chart of {value_label}")
    most = max(map(len, grouped.values()))
    thickness = 0.8 / most if in_groups else 0.66
    with styled():
        figure, axes = _axes(title)
        figure.set_figheight(0.75 + len(grouped) * (0.14 + 0.26 * most if in_groups else 0.4) + 0.3 * in_groups)
        handles = []
        for index, name in enumerate(names):
            drawn = {at: group[name] for at, group in enumerate(grouped.values()) if name in group}
            # A group without some of the names has no holes: its bars move together.
            present = [[each for each in names if each in group] for group in grouped.values()]
            shifts = [(present[at].index(name) - (len(present[at]) - 1) / 2) * thickness for at in drawn]
            bars = axes.barh(
                [at + shift for at, shift in zip(drawn, shifts, strict=True)],
                list(drawn.values()),
                thickness * 0.92,
                color=(colours or {}).get(name, COLOURS[index % len(COLOURS)]) if in_groups else COLOURS[0],
                alpha=1.0 if highlight in (None, name) else 0.42,
            )
            axes.bar_label(bars, [f"{v:,.{digits}f}" for v in drawn.values()], padding=4, fontsize=8.5)
            handles.append(bars)
        axes.set_ylim(len(grouped) - 0.5, -0.5)
        axes.set_yticks(range(len(grouped)), list(grouped))
        axes.tick_params(axis="y", labelsize=9.5)
        # Every bar carries its value, so an axis of numbers would only repeat them.
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.margins(x=0.1)
        if limit is not None:
            axes.set_xlim(0, limit)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_xlabel(value_label)
        if in_groups:
            position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
            axes.legend(handles, names, ncols=LEGEND_COLUMNS, frameon=False, handlelength=1, **position)
            axes.set_title(title or "", pad=26)
    return figure


def check_drawing() -> None:
    """Raise an error, before any long work, if matplotlib is missing."""
    load_matplotlib()


def to_svg(figure: "Figure") -> str:
    """An <svg> element for a page: its ids are unique, its ink follows light and dark, it loads nothing."""
    buffer = io.StringIO()
    with styled():
        no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    # Matplotlib uses the same ids in every figure; several figures in one page must not share them.
    own = f"fig{next(_serial)}-{hashlib.sha256(svg.encode()).hexdigest()[:8]}"
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{own}-", svg)
    svg = svg.replace('<style type="text/css">*{', f"<style>#{own} *{{").replace(INK, "currentColor")
    rules = (
        f"#{own} {{ color: {INK} }} #{own} text {{ font-family: {FONTS} !important }} "
        f"@media screen and (prefers-color-scheme: dark) {{ #{own} {{ color: {INK_ON_DARK} }} }}"
    )
    head = f'<svg id="{own}" role="img" aria-label="{escape(_description(figure), quote=True)}"'
    return re.sub(r"<svg([^>]*)>", lambda tag: f"{head}{tag[1]}>\n<style>{rules}</style>", svg, count=1)


def save_png(figure: "Figure", path: Path | str) -> None:
    """Write the figure on white, sharp on dense screens; the file appears only when it is complete."""
    png = io.BytesIO()
    with styled():
        figure.savefig(png, format="png", dpi=200, facecolor="white")
    write_bytes(path, png.getvalue())


def _axes(title: str | None) -> tuple["Figure", "Axes"]:
    # A Figure without pyplot uses Agg and is not registered anywhere, so it need not be closed.
    figure = load_matplotlib().figure.Figure()
    axes = figure.subplots()
    if title:
        axes.set_title(title)
    return figure, axes


def _check_series(series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    if not series:
        raise BraidError("there is nothing to draw", "line chart")
    for name, (xs, ys) in series.items():
        if len(xs) != len(ys):
            raise BraidError(f"{len(xs)} xs but {len(ys)} ys", f"line '{name}'")


def _description(figure: "Figure") -> str:
    axes = figure.axes[0]
    labels = " against ".join(text for text in (axes.get_ylabel(), axes.get_xlabel()) if text)
    return ": ".join(text for text in (axes.get_title(loc="left"), labels) if text)
