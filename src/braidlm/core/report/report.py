"""A report as a value: a title, a verdict, and parts from top to bottom, with the data behind them.

    report = Report("Two paths, one model", "What the demo did and how well it did it")
    report.facts({"bits per byte": "0.71", "parameters": 812_000})
    report.heading("Training").chart(Lines({"loss": (steps, losses)}, "step", "loss"), "Loss over time.", name="loss")
    write(report, folder, "report")  # report.html

A chart stays data until the reader's browser draws it (charts.js). Texts are plain, and `backticks`
become code; each renderer escapes them for its format.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from braidlm.core.errors import BraidError

COLOURS = tuple(f"var(--c{n})" for n in range(1, 6))
"""The colours of names, which tokens.css has for light and dark."""
INK = "var(--ink)"
"""The colour of what is beside: n-gram models, levels."""

Colours = Mapping[str, str]
"""{name: its colour}: the colour that a name has in other charts too."""


@dataclass(frozen=True)
class Lines:
    """Named lines, and named horizontal levels to compare them with."""

    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """{name: (xs, ys)}"""
    x_label: str
    y_label: str
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    colours: Colours = field(default_factory=dict)
    falling_x: bool = False
    """Whether the largest x is at the left, so that names stand where the smallest is."""
    mark: tuple[float, str] | None = None
    """An x that is marked by a dotted line, and what is written at the line."""
    errors: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """{name: the standard error of each of its ys}: a band around the line."""

    def __post_init__(self) -> None:
        _check(self.series, "line chart")
        for name, (xs, ys) in self.series.items():
            if len(xs) != len(ys):
                raise BraidError(f"{len(xs)} xs but {len(ys)} ys", f"line '{name}'")
            if len(errors := self.errors.get(name, ys)) != len(ys):
                raise BraidError(f"{len(ys)} ys but {len(errors)} errors", f"line '{name}'")


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
    digits: int = 2
    colours: Colours = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check([v for v in self.values.values() if not isinstance(v, Mapping) or v], f"chart of {self.value_label}")


@dataclass(frozen=True)
class StackedShares:
    """Shares of a whole as stacked bars: a panel for each {panel: shares}, side by side."""

    panels: Mapping[str, Mapping[tuple[str, str], Mapping[str, float]]]
    """{panel: {(group, row): {name: share}}}"""
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


LOCAL_FILE = re.compile(r"(?!/)[^:\\?#]+")
"""A relative path: neither a scheme nor a host, so that a link leads nowhere but to the disk."""


@dataclass(frozen=True)
class Mark:
    """A cell of a table that is right, wrong or neither."""

    text: str
    tone: Literal["right", "wrong", "neither"]
    hint: str = ""
    """The tooltip."""

    def __str__(self) -> str:
        return {"right": "✓ ", "wrong": "✗ ", "neither": ""}[self.tone] + self.text


class Strong(str):
    """A cell of a table in bold."""


@dataclass
class Table:
    """Columns and rows; a cell is a raw value, a text, a `Mark` or `Strong`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    name: str = ""
    """The name of its files, if it has some: NAME.csv, and NAME.md where the table is shown in a report."""
    title: str = ""
    """The heading of its Markdown file, and in the terminal."""
    best: int | None = None
    """The row that is emphasised."""
    groups: Sequence[tuple[str, int]] = ()
    """Headings over several columns each: (heading, how many columns)."""
    keep: int = 0
    """If above 0, columns that do not fit the terminal go into further tables, which repeat the first `keep`."""
    data: "Table | None" = None
    """What the CSV file holds, if programs need other columns or more digits."""

    def __post_init__(self) -> None:
        self.rows = [list(row) for row in self.rows]
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                where = f"table '{self.title or self.caption or self.columns[0]}'"
                raise BraidError(f"row {index} has {len(row)} cells for {len(self.columns)} columns", where)


@dataclass(frozen=True)
class Heading:
    """The heading of a section (level 2) or of a part of one (level 3)."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """Prose; an empty line begins a new paragraph."""

    text: str

    @property
    def paragraphs(self) -> list[str]:
        return re.split(r"\n\s*\n", self.text.strip())


@dataclass(frozen=True)
class Facts:
    """Key figures: {what it is: the figure}."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A chart with a caption; the name is that of the files that a reader saves (SVG, PNG, CSV)."""

    chart: Chart
    caption: str = ""
    name: str = ""


@dataclass(frozen=True)
class Quote:
    """A sample text with its line breaks."""

    text: str
    who: str = ""
    """Who wrote it."""
    prompt: str = ""
    """The text before it that the model was given."""
    note: str = ""


@dataclass(frozen=True)
class Tokens:
    """A text token by token, a row for each (label, [(token, name)]): every token in the colour of its name."""

    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    names: Sequence[str]
    """All names, in the order of their colours."""
    neutral: Collection[str] = ()
    """Names that are grey, as any name that is not in `names`."""
    caption: str = ""


@dataclass(frozen=True)
class Code:
    """A listing; with a summary it is collapsed under the summary."""

    text: str
    summary: str = ""


@dataclass(frozen=True)
class Links:
    """Links to files beside the page: {what it is: the file, relative to the page}."""

    files: Mapping[str, str]


Part = Heading | Text | Facts | Table | Picture | Quote | Tokens | Code | Links


@dataclass
class Report:
    """A report from top to bottom; every method adds a part and returns the report."""

    title: str
    subtitle: str = ""
    verdict: str = ""
    """What was found, in a few sentences."""
    parts: list[Part] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    """Tables for programs alone: each is NAME.csv."""
    data: dict[str, Any] = field(default_factory=dict)
    """Plain data for programs by the name of its file: each is NAME.json."""

    def heading(self, text: str, level: int = 2) -> Self:
        if level not in (2, 3):
            raise BraidError(f"a heading has level 2 or 3, not {level}", f"report '{self.title}'")
        return self.add(Heading(text, level))

    def text(self, text: str) -> Self:
        return self.add(Text(text))

    def facts(self, facts: Mapping[str, Any]) -> Self:
        return self.add(Facts(facts))

    def table(self, table: Table) -> Self:
        return self.add(table)

    def chart(self, chart: Chart, caption: str = "", name: str = "") -> Self:
        return self.add(Picture(chart, caption, name))

    def quote(self, text: str, who: str = "", prompt: str = "", note: str = "") -> Self:
        return self.add(Quote(text, who, prompt, note))

    def code(self, text: str, summary: str = "") -> Self:
        return self.add(Code(text, summary))

    def links(self, files: Mapping[str, str]) -> Self:
        for file in files.values():
            if not LOCAL_FILE.fullmatch(file):
                raise BraidError(f"a report links to files beside it, not to '{file}'", f"report '{self.title}'")
        return self.add(Links(files))

    def add(self, part: Part) -> Self:
        self.parts.append(part)
        return self


def cell_text(value: Any) -> str:
    """A value as people read it; not escaped."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
