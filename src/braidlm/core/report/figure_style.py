"""The quiet style of all figures: colours that everyone can tell apart, ink that pages turn light or dark."""

from typing import Any

from braidlm.core.errors import BraidError

COLOURS = ("#2b7bba", "#d55e00", "#7f9a55", "#8d52e6", "#8c5b73")
"""Colours that colour-blind readers can distinguish, with a contrast of 3:1 or more on white and near-black."""
INK = "#33363b"
"""The colour of text and reference lines; light on a dark page."""
INK_ON_DARK = "#d9d7d2"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Line styles: with more series than colours, the colours repeat dashed, then dotted."""
FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
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
    # Text stays text: sharp, selectable and in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "braid",
}


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
