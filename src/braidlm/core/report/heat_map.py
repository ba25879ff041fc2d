"""Tables of numbers as colours: where there are too many for bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from braidlm.core.errors import BraidError
from braidlm.core.report.figure_style import COLOURS, load_matplotlib, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 0.135
"""The height of a row in inches."""
LABELS = 12
"""At most this many labels along a side; others are left out, evenly."""


@dataclass(frozen=True)
class HeatMap:
    """A table with a title."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    """[row][column]"""


def heat_maps(maps: Sequence[Sequence[HeatMap]], scale: str) -> "Figure":
    """Tables below each other and side by side, in one colour: the larger a number, the stronger; `scale` says what."""
    if not maps or not all(maps):
        raise BraidError("there is nothing to draw", f"heat maps of {scale}")
    largest = max(value for line in maps for one in line for row in one.values for value in row)
    heights = [max(len(one.rows) for one in line) * CELL for line in maps]
    with styled():
        mpl = load_matplotlib()
        figure = mpl.figure.Figure()
        figure.set_figheight(sum(heights) + 0.75 * len(maps) + 0.3)
        grid = figure.subplots(len(maps), max(map(len, maps)), squeeze=False, height_ratios=heights)
        # From transparent, so that it can be read on light pages and on dark ones.
        colours = mpl.colors.LinearSegmentedColormap.from_list("braid", [f"{COLOURS[0]}00", COLOURS[0]])
        image = None
        for line, of_line in zip(grid, maps, strict=True):
            for axes in line[len(of_line) :]:
                axes.set_axis_off()
            for axes, one in zip(line, of_line, strict=False):
                image = axes.imshow(one.values, cmap=colours, vmin=0, vmax=largest, aspect="auto")
                axes.set_title(one.title, fontsize=9.5, pad=6)
                axes.set_yticks(*_ticks(one.rows))
                axes.set_xticks(*_ticks(one.columns))
                axes.tick_params(labelsize=7)
        figure.colorbar(image, ax=grid, label=scale, fraction=0.03, pad=0.02)
    return figure


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    step = -(-len(labels) // LABELS)
    return list(range(0, len(labels), step)), list(labels[::step])
