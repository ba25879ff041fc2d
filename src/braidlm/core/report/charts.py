"""Charts as data: what is drawn, in which order and under which names. `drawing.py` draws them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from braidlm.core.errors import BraidError

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""{name: (xs, ys)}."""
Colours = Mapping[str, str]
"""{name: its colour}: the colour that a name has in other charts too."""


@dataclass(frozen=True)
class Lines:
    """Named lines, and named horizontal levels to compare them with."""

    series: Series
    x_label: str
    y_label: str
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    colours: Colours = field(default_factory=dict)
    y_limits: tuple[float, float] | None = None
    """The scale, where charts share one."""
    falling_x: bool = False
    """Whether the largest x is at the left, so that names stand where the smallest is."""
    mark: tuple[float, str] | None = None
    """An x that is marked by a dotted line, and what is written at the line."""

    def __post_init__(self) -> None:
        _check(self.series, "line chart")
        for name, (xs, ys) in self.series.items():
            if len(xs) != len(ys):
                raise BraidError(f"{len(xs)} xs but {len(ys)} ys", f"line '{name}'")


@dataclass(frozen=True)
class Points:
    """Named points, each (x, y)."""

    points: Mapping[str, tuple[float, float]]
    x_label: str
    y_label: str
    colours: Colours = field(default_factory=dict)
    log: bool = False
    """Whether both axes are logarithmic."""

    def __post_init__(self) -> None:
        _check(self.points, "point chart")


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with their values: {name: value}, or groups of bars: {group: {name: value}}."""

    values: Mapping[str, float] | Mapping[str, Mapping[str, float]]
    value_label: str
    title: str = ""
    digits: int = 2
    highlight: str | None = None
    """The bar (or, in groups, the series) that the chart is about; the others are paler."""
    colours: Colours = field(default_factory=dict)
    limit: float | None = None
    """Where the scale ends; by default at the values."""

    def __post_init__(self) -> None:
        _check([v for v in self.values.values() if not isinstance(v, Mapping) or v], f"chart of {self.value_label}")


Shares = Mapping[tuple[str, str], Mapping[str, float]]
"""{(group, row): {name: share}}."""


@dataclass(frozen=True)
class StackedShares:
    """Shares of a whole as stacked bars: a panel for each {panel: shares}, side by side."""

    panels: Mapping[str, Shares]
    names: Sequence[str]
    """All names, in the order of their colours."""
    neutral: Collection[str] = ()
    """Names that are grey."""

    def __post_init__(self) -> None:
        _check([row for shares in self.panels.values() for row in shares], "chart of shares")


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers as colours."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    """[row][column]"""


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps below each other and side by side, on one scale."""

    maps: Sequence[Sequence[HeatMap]]
    scale: str
    """What the numbers are."""

    def __post_init__(self) -> None:
        _check(self.maps and all(self.maps), f"heat maps of {self.scale}")


Chart = Lines | Points | Bars | StackedShares | HeatMaps


def _check(drawn: object, what: str) -> None:
    if not drawn:
        raise BraidError("there is nothing to draw", what)
