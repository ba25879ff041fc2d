"""The tables of results in Markdown pages, and the numbers that a file of benchmarks/results/ accounts for.

Each table is followed by a line that says where its numbers are from:

    From `FILE.json`, `FILE.json`.    measured: each number is in one of the files, with the command that made it
    The paper's numbers.              printed in a paper
    Counted by `braid show`.          follows from the code, and is tested elsewhere

In a measured table *italics* are a paper's numbers. Numbers that no file has are listed on the line, by their reason:

    From `FILE.json`; sums and ratios: 9.0, 0.26; counted by `braid show`: 27.6; not recorded: 76.82.
"""

import bisect
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SOURCE = re.compile(r"^(From `|The paper's numbers|Counted by `)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_NAMED = re.compile(r"(?<![\w.`/-])(?:[-+−]|(?P<spread>±|\+-) ?)?(?P<number>\d[\d,]*(?:\.\d+)?)")
"""A number of a cell that is not part of a word, of a name or of a date; or a deviation, after ± or +-."""
_UNITS = (1.0, 100.0, 1e3, 1e-3, 1e-6, 1e-9)
"""Shares are printed as percentages, counts in thousands or millions, seconds in milliseconds."""
_COURSES = {"curve", "course"}
"""Validation during a training: no table prints it, and its many numbers would account for anything."""
_ABOUT_A_RUN = {"seed", "folder", "run_folder", "date", "note"}
_TOGETHER = (("blimp_filtered", "blimp_supplement"), ("wug_adj", "wug_past"), ("eye_tracking", "self_paced"))
"""Tasks that BabyLM's tables print as one, their mean."""


@dataclass(frozen=True)
class Table:
    """One table of a page."""

    line: int
    rows: tuple[str, ...]
    source: str
    """The line below it that says where its numbers are from; '' where there is none."""

    @property
    def files(self) -> list[str]:
        """The measured table's files."""
        return re.findall(r"`([^`]+\.json)`", self.source)

    @property
    def listed(self) -> set[str]:
        """Its numbers that are not in the files, and for which the line gives a reason."""
        reasons = self.source.split("; ")[1:]
        return {number for reason in reasons for number in _numbers_in(reason.split(": ")[-1])}

    @property
    def numbers(self) -> list[str]:
        """What the cells print, but for the first of each row, which names it, and for what is marked."""
        cells = [cell for row in self.rows[2:] for cell in row.strip("| ").split(" | ")[1:]]
        plain = (re.sub(r"`[^`]*`|\]\([^)]*\)|(?<!\*)\*[^*]+\*(?!\*)", "", c) for c in cells)
        return [number for cell in plain for number in _numbers_in(cell)]


def _numbers_in(text: str) -> list[str]:
    return [("±" if found["spread"] else "") + found["number"] for found in _NAMED.finditer(text)]


def tables(page: Path) -> Iterator[Table]:
    """The tables of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    for start in starts:
        end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
        below = next((line for line in lines[end:] if line), "")
        yield Table(start + 1, tuple(lines[start:end]), below if SOURCE.match(below) else "")


class Recorded:
    """The numbers of some files: as they stand, and as means and deviations over seeds and over a group's members."""

    def __init__(self, values: Iterable[float], deviations: Iterable[float] = ()):
        self.values = sorted({abs(value) * unit for value in values for unit in _UNITS})
        self.deviations = sorted({*deviations})

    def has(self, printed: str) -> bool:
        """Whether one of the numbers is printed so, rounded to as many digits; a deviation only after ±."""
        plain = printed.replace(",", "").removeprefix("±")
        half = 0.5 * 10.0 ** -len(plain.partition(".")[2]) + 1e-9
        for known in (self.values, self.deviations if printed.startswith("±") else []):
            first = bisect.bisect_left(known, float(plain) - half)
            if first < len(known) and known[first] <= float(plain) + half:
                return True
        return False


def recorded(names: Iterable[str]) -> Recorded:
    found = [_values_of(name) for name in names]
    return Recorded(set().union(*(values for values, _ in found)), set().union(*(spread for _, spread in found)))


@cache
def _values_of(name: str) -> tuple[set[float], set[float]]:
    """The numbers of a file with their means over seeds, and their deviations."""
    data = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    found, deviations = {value for _, value in _leaves(data)}, set()
    for runs in _over_seeds(data).values():
        by_path = defaultdict(list)
        for run in runs:
            for path, value in [*_leaves(run), *_means(run)]:
                by_path[path].append(value)
        for values in by_path.values():
            found |= {*values, mean(values)}
            deviations |= {stdev(values)} if len(values) > 1 else set()
    return found, deviations


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """All numbers of a file, those in its texts included, each with where it stands."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in _COURSES:
                yield from _leaves(value, (*path, key))
    elif isinstance(data, list):
        for at, value in enumerate(data):
            yield from _leaves(value, (*path, at))
    elif isinstance(data, str):
        yield from ((path, float(number.replace(",", ""))) for number in _NUMBER.findall(data))
    elif data is not None and not isinstance(data, bool):
        yield path, float(data)


def _means(run: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """The means over the members of each group of a run: bits per byte of its domains, tasks that are one column."""
    for key, value in run.items():
        if isinstance(value, dict) and key not in _COURSES:
            yield from _means(value, (*path, key))
            if value and all(isinstance(member, int | float) for member in value.values()):
                yield (*path, key, "mean"), mean(value.values())
    for names in _TOGETHER:
        if all(isinstance(run.get(name), int | float) for name in names):
            yield (*path, names, "mean"), mean(run[name] for name in names)


def _over_seeds(data: Any) -> dict[Any, list[dict[str, Any]]]:
    """The runs of a file that differ in their seed alone."""
    groups = defaultdict(list)
    for run in _runs(data):
        named = {key: value for key, value in run.items() if isinstance(value, str) and key not in _ABOUT_A_RUN}
        short = tuple(sorted((key, value) for key, value in named.items() if len(value) < 60))
        groups[short].append(run)
    return groups


def _runs(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, list):
        yield from (row for row in data if isinstance(row, dict))
    elif isinstance(data, dict):
        for value in data.values():
            yield from _runs(value)
