"""Plots in one quiet style, for pages (inline SVG that follows light and dark) and for documents (PNG).

Lines are named where they end, not in a legend, so that a reader never has to match colours.
"""

import hashlib
import io
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2b7bba", "#d55e00", "#7f9a55", "#8d52e6", "#8c5b73")
"""Colours that colour-blind readers can distinguish, with a contrast of 3:1 or more on white and near-black."""
INK = "#33363b"
"""The colour of text and reference lines; light on a dark page."""
INK_ON_DARK = "#d9d7d2"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Line styles: with more series than colours, the colours repeat dashed, then dotted."""
FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LEGEND_COLUMNS = 5
LABEL_GAP = 0.068
"""The smallest distance between two names at the right edge, as a share of the height."""

STYLE: dict[str, Any] = {
    "figure.figsize": (6.8, 3.6),
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 9.5,
    "axes.labelpad": 6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    # Names come from users, so a dollar sign must not start a formula.
    "text.parse_math": False,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3.5,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    # Text stays text: sharp, selectable and in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "braid",
}

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
        for index, (name, (xs, ys)) in enumerate(series.items()):
            colour = (colours or {}).get(name, COLOURS[index % len(COLOURS)])
            dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(xs) < 20 else {}
            axes.plot(xs, ys, color=colour, linestyle=DASHES[index // len(COLOURS) % len(DASHES)], **dots)
            ends = [y for y in ys if math.isfinite(y) and (y > 0 or not log_y)]
            if ends:
                names.append((name, ends[-1], colour))
        for name, level in (levels or {}).items():
            axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
            names.append((name, level, INK))
        if y_limits is not None:
            axes.set_ylim(y_limits)
        _scale(axes.xaxis, axes.set_xscale, log_x)
        _scale(axes.yaxis, axes.set_yscale, log_y)
        _name_at_the_edge(axes, names)
    return figure


def point_chart(points: Mapping[str, tuple[float, float]], x_label: str, y_label: str) -> "Figure":
    """Named points, each (x, y) with its name beside it, moved apart where two would overlap."""
    if not points:
        raise BraidError("there is nothing to draw", "point chart")
    with styled():
        figure, axes = _axes(None)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid()
        axes.margins(x=0.18, y=0.1)  # names need room
        colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(points)}
        for name, (x, y) in points.items():
            axes.plot([x], [y], color=colours[name], marker="o", markersize=6)
        _scale(axes.xaxis, axes.set_xscale, False)
        _scale(axes.yaxis, axes.set_yscale, False)
        to_share = axes.transData + axes.transAxes.inverted()
        spots = sorted((*reversed(to_share.transform(point)), name) for name, point in points.items())
        heights = _spread([float(height) for height, _, _ in spots], LABEL_GAP)
        for (_, x, name), height in zip(spots, heights, strict=True):
            axes.annotate(name, (x, height), (8, 0), "axes fraction", "offset points", color=colours[name], va="center")
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


Shares = Mapping[tuple[str, str], Mapping[str, float]]
"""{(group, row): {name: share}}."""


def share_chart(panels: Mapping[str, Shares], names: Sequence[str], neutral: Collection[str] = ()) -> "Figure":
    """The share of each name as stacked bars: a panel for each of {panel: shares}, side by side.

    `names` are all names, in the order of their colours; those in `neutral` are grey.
    """
    rows = list(dict.fromkeys(row for shares in panels.values() for row in shares))
    if not rows:
        raise BraidError("there is nothing to draw", "chart of shares")
    groups = list(dict.fromkeys(group for group, _ in rows))
    # The name of each group is written above its first bar.
    heights = {row: at + 0.9 * (groups.index(row[0]) + 1) for at, row in enumerate(rows)}
    coloured = [name for name in names if name not in neutral]
    looks = {
        name: {"color": COLOURS[n % len(COLOURS)], "alpha": 0.55 ** (n // len(COLOURS) % 3)}
        for n, name in enumerate(coloured)
    }
    looks |= {name: {"color": INK, "alpha": 0.3} for name in neutral}
    with styled():
        figure = load_matplotlib().figure.Figure()
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        bars: dict[str, Any] = {}
        for axes, (panel, shares) in zip(all_axes, panels.items(), strict=True):
            for row, parts in shares.items():
                for name, left, share in _stacked(names, parts):
                    bars[name] = axes.barh(heights[row], share, 0.82, left, **looks[name])
                    if share >= 0.07 * len(panels):
                        ink = INK if name in neutral else "#ffffff"
                        style = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
                        axes.text(left + share / 2, heights[row], f"{share:.0%}", **style)
            axes.set_title(panel if len(panels) > 1 else "", fontsize=9.5, pad=9)
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
            axes.set_ylim(max(heights.values()) + 0.5, 0)
        for group in groups:
            top = min(heights[row] for row in rows if row[0] == group)
            all_axes[0].text(0, top - 0.52, group, fontsize=8.5, fontweight="bold", va="bottom")
        all_axes[0].set_yticks([heights[row] for row in rows], [row for _, row in rows])
        drawn = [name for name in names if name in bars]
        options = {"loc": "outside upper left", "ncols": LEGEND_COLUMNS, "frameon": False, "handlelength": 1}
        figure.legend([bars[name] for name in drawn], drawn, **options)
        above = 0.25 * math.ceil(len(drawn) / LEGEND_COLUMNS) + (0.22 if len(panels) > 1 else 0.0)
        figure.set_figheight(0.5 + above + 0.27 * len(rows) + 0.24 * len(groups))
    return figure


def _stacked(names: Sequence[str], parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(name, start, share) of each bar that is not empty, in order."""
    bars, left = [], 0.0
    for name in names:
        if parts.get(name, 0.0) > 0:
            bars.append((name, left, parts[name]))
            left += parts[name]
    return bars


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


def load_matplotlib() -> Any:
    """The package, which is an extra, or an error that says how to install it."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise BraidError(
            "plots need matplotlib, which is not installed", todo="Install it with: pip install 'braidlm[plot]'"
        ) from None
    return matplotlib


def styled() -> Any:
    """A context in which figures have Braid's style."""
    return load_matplotlib().rc_context(STYLE)


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


def _scale(axis: Any, set_scale: Any, log: bool) -> None:
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


def _name_at_the_edge(axes: "Axes", names: Sequence[tuple[str, float, str]]) -> None:
    """Write each name at the right of the plot, at its height, moved apart where two would overlap."""
    to_share = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    labels = sorted(((float(to_share.transform((x, y))[1]), name, colour) for name, y, colour in names))
    for (_, name, colour), height in zip(labels, _spread([label[0] for label in labels], LABEL_GAP), strict=True):
        axes.annotate(name, (1, height), (6, 0), "axes fraction", "offset points", color=colour, va="center")


def _spread(heights: Sequence[float], gap: float) -> list[float]:
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


def _description(figure: "Figure") -> str:
    axes = figure.axes[0]
    labels = " against ".join(text for text in (axes.get_ylabel(), axes.get_xlabel()) if text)
    return ": ".join(text for text in (axes.get_title(loc="left"), labels) if text)
