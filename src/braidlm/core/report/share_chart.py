"""Shares of a whole as stacked bars: where tokens go."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from braidlm.core.errors import BraidError
from braidlm.core.report.figure_style import COLOURS, INK, LEGEND_COLUMNS, load_matplotlib, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
