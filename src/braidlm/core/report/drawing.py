"""Charts as PNG files for documents, drawn by matplotlib as charts.js draws them for pages.

Lines are named where they end, not in a legend, so that a reader never has to match colours.
"""

import importlib.util
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from braidlm.core.errors import BraidError
from braidlm.core.report.axis_labels import name_at_the_edge, name_points, scale_axis
from braidlm.core.report.report import COLOURS, INK, Bars, Chart, HeatMaps, Lines, Points, StackedShares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Line styles: with more series than colours, the colours repeat dashed, then dotted."""
LEGEND_COLUMNS = 5
"""In one row of a legend."""

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
}


def can_draw() -> bool:
    """Whether matplotlib, which is an extra, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def load_matplotlib() -> Any:
    """The package, which is an extra, or an error that says how to install it."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        what = "plots need matplotlib, which is not installed"
        raise BraidError(what, todo="Install it with: pip install 'braidlm[plot]'") from None
    return matplotlib


def styled() -> Any:
    """A context in which figures have Braid's style."""
    return load_matplotlib().rc_context(STYLE)


CELL = 0.135
"""The height of a row of a heat map in inches."""
MAX_LABELS = 12
"""At most this many labels stand along a side of a heat map; others are left out, evenly."""


def draw(chart: Chart) -> "Figure":
    """A chart as a figure in Braid's style."""
    with styled():
        # A Figure without pyplot uses Agg and is not registered anywhere, so it need not be closed.
        figure = load_matplotlib().figure.Figure()
        DRAWN_BY[type(chart)](chart, figure)
    return figure


def _lines(chart: Lines, figure: "Figure") -> None:
    axes = _labelled_axes(figure, chart.title, chart.x_label, chart.y_label)
    axes.grid(axis="y")
    axes.margins(x=0.012)
    names: list[tuple[str, float, str]] = []
    drawn: Counter[str] = Counter()
    for index, (name, (xs, ys)) in enumerate(chart.series.items()):
        colour = chart.colours.get(name, COLOURS[index % len(COLOURS)])
        dashes = DASHES[drawn[colour] % len(DASHES)]  # lines of one colour differ in their dashes
        drawn[colour] += 1
        dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(xs) < 20 else {}
        axes.plot(xs, ys, color=colour, linestyle=dashes, **dots)
        ends = [y for y in ys if math.isfinite(y) and (y > 0 or not chart.log_y)]
        if ends:
            names.append((name, ends[-1], colour))
    for name, level in chart.levels.items():
        axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
        names.append((name, level, INK))
    if chart.y_limits is not None:
        axes.set_ylim(chart.y_limits)
    scale_axis(axes.xaxis, axes.set_xscale, chart.log_x)
    scale_axis(axes.yaxis, axes.set_yscale, chart.log_y)
    name_at_the_edge(axes, names)
    if chart.mark is not None:  # a dotted line, with a label at the side that has more points
        x, label = chart.mark
        before = [other < x for xs, _ in chart.series.values() for other in xs]
        late = 2 * sum(before) >= len(before)
        axes.axvline(x, color=INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.8)
        place: dict[str, Any] = {"color": INK, "ha": "right" if late else "left", "fontsize": 8.5}
        axes.annotate(label, (x, 0.02), (-5 if late else 5, 0), ("data", "axes fraction"), "offset points", **place)
    if chart.falling_x:
        axes.invert_xaxis()


def _points(chart: Points, figure: "Figure") -> None:
    axes = _labelled_axes(figure, "", chart.x_label, chart.y_label)
    axes.grid()
    axes.margins(x=0.18, y=0.1)  # names need room
    colours = chart.colours or {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(chart.points)}
    for name, (x, y) in chart.points.items():
        axes.plot([x], [y], color=colours[name], marker="o", markersize=6)
    scale_axis(axes.xaxis, axes.set_xscale, chart.log)
    scale_axis(axes.yaxis, axes.set_yscale, chart.log)
    name_points(axes, chart.points, colours)


def _bars(chart: Bars, figure: "Figure") -> None:
    grouped = {group: v if isinstance(v, Mapping) else {group: v} for group, v in chart.values.items()}
    in_groups = any(isinstance(v, Mapping) for v in chart.values.values())
    names = list(dict.fromkeys(name for group in (chart.colours, *grouped.values()) for name in group))
    names = [name for name in names if any(name in group for group in grouped.values())]
    most = max(map(len, grouped.values()))
    thickness = 0.8 / most if in_groups else 0.66
    axes = _labelled_axes(figure, chart.title, chart.value_label)
    figure.set_figheight(0.75 + len(grouped) * (0.14 + 0.26 * most if in_groups else 0.4) + 0.3 * in_groups)
    # A group without some of the names has no holes: its bars move together.
    present = [[each for each in names if each in group] for group in grouped.values()]
    handles = []
    for index, name in enumerate(names):
        drawn = {at: group[name] for at, group in enumerate(grouped.values()) if name in group}
        bars = axes.barh(
            [at + (present[at].index(name) - (len(present[at]) - 1) / 2) * thickness for at in drawn],
            list(drawn.values()),
            thickness * 0.92,
            color=chart.colours.get(name, COLOURS[index % len(COLOURS)]) if in_groups else COLOURS[0],
            alpha=1.0 if chart.highlight in (None, name) else 0.42,
        )
        axes.bar_label(bars, [f"{v:,.{chart.digits}f}" for v in drawn.values()], padding=4, fontsize=8.5)
        handles.append(bars)
    axes.set_ylim(len(grouped) - 0.5, -0.5)
    axes.set_yticks(range(len(grouped)), list(grouped))
    axes.tick_params(axis="y", labelsize=9.5)
    # Every bar carries its value, so an axis of numbers would only repeat them.
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.1)
    if chart.limit is not None:
        axes.set_xlim(0, chart.limit)
    axes.axvline(0, color=INK, linewidth=0.8)
    if in_groups:
        position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
        axes.legend(handles, names, ncols=LEGEND_COLUMNS, frameon=False, handlelength=1, **position)
        axes.set_title(chart.title, pad=26)


def _shares(chart: StackedShares, figure: "Figure") -> None:
    rows = list(dict.fromkeys(row for shares in chart.panels.values() for row in shares))
    groups = list(dict.fromkeys(group for group, _ in rows))
    # The name of each group is written above its first bar.
    heights = {row: at + 0.9 * (groups.index(row[0]) + 1) for at, row in enumerate(rows)}
    looks = {
        name: {"color": COLOURS[n % len(COLOURS)], "alpha": 0.55 ** (n // len(COLOURS) % 3)}
        for n, name in enumerate(name for name in chart.names if name not in chart.neutral)
    }
    looks |= {name: {"color": INK, "alpha": 0.3} for name in chart.neutral}
    panels = len(chart.panels)
    all_axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    bars: dict[str, Any] = {}
    for axes, (panel, shares) in zip(all_axes, chart.panels.items(), strict=True):
        for row, parts in shares.items():
            left = 0.0
            for name in chart.names:
                if (share := parts.get(name, 0.0)) <= 0:
                    continue
                bars[name] = axes.barh(heights[row], share, 0.82, left, **looks[name])
                if share >= 0.07 * panels:
                    style = {"fontsize": 8, "color": INK if name in chart.neutral else "#ffffff"}
                    axes.text(left + share / 2, heights[row], f"{share:.0%}", ha="center", va="center", **style)
                left += share
        axes.set_title(panel if panels > 1 else "", fontsize=9.5, pad=9)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
        axes.set_ylim(max(heights.values()) + 0.5, 0)
    for group in groups:
        top = min(heights[row] for row in rows if row[0] == group)
        all_axes[0].text(0, top - 0.52, group, fontsize=8.5, fontweight="bold", va="bottom")
    all_axes[0].set_yticks([heights[row] for row in rows], [row for _, row in rows])
    drawn = [name for name in chart.names if name in bars]
    options = {"loc": "outside upper left", "ncols": LEGEND_COLUMNS, "frameon": False, "handlelength": 1}
    figure.legend([bars[name] for name in drawn], drawn, **options)
    above = 0.25 * math.ceil(len(drawn) / LEGEND_COLUMNS) + (0.22 if panels > 1 else 0.0)
    figure.set_figheight(0.5 + above + 0.27 * len(rows) + 0.24 * len(groups))


def _heat_maps(chart: HeatMaps, figure: "Figure") -> None:
    """In one colour: the larger a number, the stronger."""
    largest = max(value for line in chart.maps for one in line for row in one.values for value in row)
    heights = [max(len(one.rows) for one in line) * CELL for line in chart.maps]
    figure.set_figheight(sum(heights) + 0.75 * len(chart.maps) + 0.3)
    grid = figure.subplots(len(chart.maps), max(map(len, chart.maps)), squeeze=False, height_ratios=heights)
    # From transparent, so that it can be read on light pages and on dark ones.
    colour_map = load_matplotlib().colors.LinearSegmentedColormap
    colours = colour_map.from_list("braid", [f"{COLOURS[0]}00", COLOURS[0]])
    image: Any = None
    for line, maps in zip(grid, chart.maps, strict=True):
        for axes in line[len(maps) :]:
            axes.set_axis_off()
        for axes, one in zip(line, maps, strict=False):
            image = axes.imshow(one.values, cmap=colours, vmin=0, vmax=largest, aspect="auto")
            axes.set_title(one.title, fontsize=9.5, pad=6)
            axes.set_yticks(*_ticks(one.rows))
            axes.set_xticks(*_ticks(one.columns))
            axes.tick_params(labelsize=7)
    figure.colorbar(image, ax=grid, label=chart.scale, fraction=0.03, pad=0.02)


DRAWN_BY: dict[type[Chart], Callable[[Any, "Figure"], None]] = {
    Lines: _lines,
    Points: _points,
    Bars: _bars,
    StackedShares: _shares,
    HeatMaps: _heat_maps,
}


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    step = -(-len(labels) // MAX_LABELS)
    return list(range(0, len(labels), step)), list(labels[::step])


def _labelled_axes(figure: "Figure", title: str, x_label: str, y_label: str = "") -> "Axes":
    axes = figure.subplots()
    if title:
        axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def to_png(figure: "Figure") -> bytes:
    """The figure on white, sharp on dense screens."""
    png = io.BytesIO()
    with styled():
        figure.savefig(png, format="png", dpi=200, facecolor="white")
    return png.getvalue()
