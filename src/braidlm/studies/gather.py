"""The table of any runs: each with what differs in its recipe, its seed, cost, result and end, and none left out."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from braidlm.core.differences import Differences, differences, shown
from braidlm.core.files import json_sha256, make_folder
from braidlm.core.report.rendering import show_report, write
from braidlm.core.report.report import Bars, Report, Table
from braidlm.core.report.verdicts import ranking
from braidlm.data.loading.config import CACHE_KEYS
from braidlm.opening.names import StrPath
from braidlm.studies.results import RUN_FACTS, ModelResult, read_runs
from braidlm.studies.tables import add_differences, add_recipes, cells, duration
from braidlm.training.run_folder import identity

NAME = "runs"
PAGE = f"{NAME}.html"
BITS = "bits per byte"
COSTS = ("parameters", "FLOPs per token", "words", "training", "wall clock", "hardware")
SCORES = (BITS, "best", "best at step", "seed")
"""The columns for people before those that differ."""
ENDS = (*COSTS, "state")
"""The columns after them."""
MAX_VARIED = 6
"""Recipes that differ in more keys have a table of them; in the table of runs there is no room."""
SEED = re.compile(r"\bseed=\d+,?")
"""The part of the name of a sweep's run in which runs of one recipe differ."""
MAX_BARS = 20
"""At most so many recipes are drawn."""
SHOWN = (BITS, "best", "wall clock", "state")


def gather_runs(folders: Sequence[StrPath], out: StrPath) -> list[ModelResult]:
    """Write the table of all runs in these folders into `out`, as CSV, Markdown and a page; nothing is trained. The
    files of a table of fewer runs are replaced."""
    runs = read_runs(folders)
    make_folder(Path(out))
    write(run_report(runs, Path(out).absolute().name), out, NAME)
    return runs


def run_table(runs: Sequence[ModelResult]) -> Table:
    """A row for each run, with every column; the file has every digit."""
    varied = _varied(runs)
    halves = {run.half for run in runs}
    (half,) = halves if len(halves) == 1 else (None,)
    scored = [name if half is None or name != BITS else f"{BITS}, {half} half" for name in SCORES]
    rows, facts, columns = [], [], [] if len(varied) > MAX_VARIED else list(varied)
    for run in runs:
        own, values = run.run_facts(), [each.get(str(run.folder)) for each in varied.values()]
        written = [None if value is None else shown(value) for value in values if columns]
        known = own | {"seconds": run.seconds}
        rows.append([run.name, *cells(known, SCORES), *written, *cells(known, ENDS)])
        facts.append([run.name, *values, *(own[fact] for fact in RUN_FACTS)])
    scores = {at: run.bits_per_byte for at, run in enumerate(runs) if run.is_done and run.bits_per_byte is not None}
    return Table(
        ["run", *scored, *columns, *ENDS],
        rows,
        name=NAME,
        title=f"{len(runs)} runs",
        best=min(scores, key=scores.__getitem__) if scores else None,
        data=Table(["run", *varied, *RUN_FACTS], facts),
    )


def _varied(runs: Sequence[ModelResult]) -> Differences:
    """The keys in which the recipes differ, besides names, folders and seeds; a study that failed has other keys."""
    return differences({str(run.folder): _compared(run.recipe) for run in runs if "domains" not in run.recipe})


def show_runs(runs: Sequence[ModelResult], title: str = "") -> None:
    """The results alone in the terminal; the files have every column."""
    table = run_table(runs)
    shown = [at for at, name in enumerate(table.columns) if at == 0 or name.partition(",")[0] in SHOWN]
    rows = [[row[at] for at in shown] for row in table.rows]
    show_report(Table([table.columns[at] for at in shown], rows, title=title, keep=1))


def _compared(recipe: dict[str, Any]) -> dict[str, Any]:
    kept = identity(recipe, recipe)
    data = {key: value for key, value in kept.get("data", {}).items() if key not in CACHE_KEYS}
    return {key: value for key, value in kept.items() if key != "seed"} | {"data": data}


def run_report(runs: Sequence[ModelResult], title: str) -> Report:
    """The table, and every recipe in full."""
    report = Report(title, "Every run, in the order in which they were started")
    done = sum(run.is_done for run in runs)
    named: dict[str, str] = {}  # runs that differ in their seeds alone are one
    scores: dict[str, list[float]] = {}
    for run in runs:
        if run.is_done and run.bits_per_byte is not None:
            without_seed = SEED.sub("", run.name).strip(",") or run.name
            name = named.setdefault(json_sha256(_compared(run.recipe)), without_seed)
            scores.setdefault(name, []).append(run.bits_per_byte)
    report.verdict = ranking(scores, f"recipes ({len(runs)} runs, {done} of them done)")
    machines = dict.fromkeys(run.hardware for run in runs if run.hardware is not None)
    facts = {"runs": len(runs), "done": done, "wall clock of all": duration(sum(run.wall_seconds for run in runs))}
    report.facts(facts | ({"hardware": "; ".join(machines)} if machines else {}))
    lowest = sorted((mean(each), name) for name, each in scores.items())[:MAX_BARS]
    if lowest:
        bars = Bars({name: bits for bits, name in lowest}, "bits per byte (lower is better)", digits=4)
        report.chart(bars, f"The {len(lowest)} lowest; runs that differ in their seeds alone are one.", "bits-per-byte")
    report.table(run_table(runs))
    if len(varied := _varied(runs)) > MAX_VARIED:
        names = {str(run.folder): run.name for run in runs}
        add_differences(report, {key: {names[folder]: v for folder, v in own.items()} for key, own in varied.items()})
    report.text(
        "After the seed come the keys in which recipes differ. Bits per byte are of the last validation; the "
        "best validation and its step are beside it, since a run that has become worse was trained too long. Training "
        "is the time of steps alone, and wall clock has validation, samples and saving in it."
    )
    add_recipes(report, {run.name: run.recipe for run in runs})
    return report.links({"The table as CSV, with every digit": f"{NAME}.csv", "The table as Markdown": f"{NAME}.md"})
