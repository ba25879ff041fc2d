"""The table of runs: each with what differs in its recipe, its seed, cost, result and end, and none left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braidlm.core.console import count, duration
from braidlm.core.differences import Differences, differences, shown
from braidlm.core.files import make_folder
from braidlm.core.report.report import Report, Table
from braidlm.core.report.text import show_report
from braidlm.core.report.write import write
from braidlm.opening.names import StrPath
from braidlm.studies.variants.run_record import RunRecord, read_runs
from braidlm.training.run_folder import identity

NAME = "runs"
"""The name of the table's files."""
PAGE = f"{NAME}.html"
FACTS = (
    *("seed", "parameters", "flops_per_token", "steps", "tokens", "words", "bits_per_byte", "best_bits_per_byte"),
    *("best_step", "best_words", "half", "training_seconds", "wall_seconds", "hardware", "started", "state"),
)
"""The columns of the CSV file after those that differ."""
BITS = "bits per byte"
RESULTS = (
    *("seed", "parameters", "FLOPs per token", "words", BITS, "best", "best at step"),
    *("training", "wall clock", "hardware", "state"),
)
"""The columns for people after those that differ."""
SHOWN = (BITS, "best", "best at step", "wall clock", "state")
"""The columns in the terminal."""


def gather_runs(folders: Sequence[StrPath], out: StrPath) -> list[RunRecord]:
    """Write the table of all runs in these folders into `out`, as CSV, Markdown and a page; nothing is trained.

    The files of a table of fewer runs are replaced.
    """
    runs = read_runs(folders)
    make_folder(Path(out))
    write(run_report(runs, Path(out).absolute().name), out, NAME)
    return runs


def run_table(runs: Sequence[RunRecord]) -> Table:
    """A row for each run, with every column; the file has every digit."""
    varied = _varied(runs)
    halves = {run.half for run in runs}
    (half,) = halves if len(halves) == 1 else (None,)
    results = [name if half is None or name != BITS else f"{BITS}, {half} half" for name in RESULTS]
    facts = [[run.name, *_values(run, varied), *(getattr(run, fact) for fact in FACTS)] for run in runs]
    scores = {at: run.bits_per_byte for at, run in enumerate(runs) if run.is_done and run.bits_per_byte is not None}
    return Table(
        ["run", *varied, *results],
        [_row(run, varied) for run in runs],
        name=NAME,
        title=f"{len(runs)} runs",
        best=min(scores, key=scores.__getitem__) if scores else None,
        data=Table(["run", *varied, *FACTS], facts),
    )


def show_runs(runs: Sequence[RunRecord], title: str = "") -> None:
    """The results alone in the terminal; the files have every column."""
    table = run_table(runs)
    first = len(table.columns) - len(RESULTS)
    shown = [0, *(at for at, name in enumerate(RESULTS, first) if name in SHOWN)]
    rows = [[row[at] for at in shown] for row in table.rows]
    show_report(Table([table.columns[at] for at in shown], rows, title=title, keep=1))


def _row(run: RunRecord, varied: Differences) -> list[str | None]:
    def number(value: float | None, form: str = ",") -> str | None:
        return None if value is None else format(value, form)

    return [
        run.name,
        *(None if value is None else shown(value) for value in _values(run, varied)),
        number(run.seed, ""),
        number(run.parameters),
        None if run.flops_per_token is None else count(float(run.flops_per_token)),
        count(run.words),
        number(run.bits_per_byte, ".4f"),
        number(run.best_bits_per_byte, ".4f"),
        number(run.best_step),
        duration(run.training_seconds),
        duration(run.wall_seconds),
        run.hardware,
        run.state,
    ]


def _varied(runs: Sequence[RunRecord]) -> Differences:
    """The keys in which the recipes differ, besides names, folders and seeds; a study that failed has other keys."""
    return differences({str(run.folder): _compared(run.recipe) for run in runs if "domains" not in run.recipe})


def _values(run: RunRecord, varied: Differences) -> list[Any]:
    return [values.get(str(run.folder)) for values in varied.values()]


def _compared(recipe: dict[str, Any]) -> dict[str, Any]:
    kept = identity(recipe, recipe)
    data = {key: value for key, value in kept.get("data", {}).items() if key != "cache"}
    return {key: value for key, value in kept.items() if key != "seed"} | {"data": data}


def run_report(runs: Sequence[RunRecord], title: str) -> Report:
    """The table, and every recipe in full."""
    report = Report(title, "Every run, in the order in which they were started")
    done = sum(run.is_done for run in runs)
    machines = dict.fromkeys(run.hardware for run in runs if run.hardware is not None)
    facts = {"runs": len(runs), "done": done, "wall clock of all": duration(sum(run.wall_seconds for run in runs))}
    report.facts(facts | ({"hardware": "; ".join(machines)} if machines else {})).table(run_table(runs))
    report.text(
        "Columns after the first are the keys in which recipes differ. Bits per byte are of the last validation; the "
        "best validation and its step are beside it, since a run that has become worse was trained too long. Training "
        "is the time of steps alone, and wall clock has validation, samples and saving in it."
    )
    for run in runs:
        report.code(json.dumps(run.recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {run.name}")
    return report.links({"The table as CSV, with every digit": f"{NAME}.csv", "The table as Markdown": f"{NAME}.md"})
