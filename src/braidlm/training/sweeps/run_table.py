"""The table of runs: each with what differs in its recipe, its seed, cost, result and end, and none left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from braidlm.core import console
from braidlm.core.console import count, duration
from braidlm.core.differences import Differences, differences, shown
from braidlm.core.files import make_folder, write_text
from braidlm.core.report.page import Page
from braidlm.core.report.table import Table, csv_text
from braidlm.opening.names import StrPath
from braidlm.training.run_folder import identity
from braidlm.training.sweeps.run_record import RunRecord, read_runs

NAME = "runs"
"""Of the table's files."""
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
"""Those for people."""
SHOWN = (BITS, "best", "best at step", "wall clock", "state")
"""Those in the terminal."""


def gather_runs(folders: Sequence[StrPath], out: StrPath) -> list[RunRecord]:
    """Write the table of all runs in these folders into `out`, as CSV, Markdown and a page; nothing is trained."""
    runs = read_runs(folders)
    make_folder(Path(out))
    write_run_table(runs, Path(out))
    return runs


def write_run_table(runs: Sequence[RunRecord], folder: Path) -> None:
    """Write the files of the table, replacing those of fewer runs."""
    varied = _varied(runs)
    rows = [[run.name, *_values(run, varied), *(getattr(run, fact) for fact in FACTS)] for run in runs]
    write_text(folder / f"{NAME}.csv", csv_text(["run", *varied, *FACTS], rows))
    table = run_table(runs)
    write_text(folder / f"{NAME}.md", f"# {table.title}\n\n{table.markdown()}")
    _page(runs, table, folder).write(folder / PAGE)


def run_table(runs: Sequence[RunRecord]) -> Table:
    """The table for people."""
    varied = _varied(runs)
    halves = {run.half for run in runs}
    (half,) = halves if len(halves) == 1 else (None,)
    results = [name if half is None or name != BITS else f"{BITS}, {half} half" for name in RESULTS]
    return Table(NAME, f"{len(runs)} runs", ["run", *varied, *results], [_row(run, varied) for run in runs])


def show_runs(runs: Sequence[RunRecord], title: str | None = None) -> None:
    """The results alone in the terminal; the files have every column."""
    table = run_table(runs)
    first = len(table.columns) - len(RESULTS)
    shown = [at for at, name in enumerate(RESULTS, first) if name in SHOWN]
    columns = ["run", *(table.columns[at] for at in shown)]
    console.table(columns, [[escape(row[0]), *(escape(row[at]) for at in shown)] for row in table.rows], title, keep=1)


def _row(run: RunRecord, varied: Differences) -> list[str]:
    def number(value: float | None, form: str = ",") -> str:
        return "–" if value is None else format(value, form)

    return [
        run.name,
        *("–" if value is None else shown(value) for value in _values(run, varied)),
        number(run.seed, ""),
        number(run.parameters),
        "–" if run.flops_per_token is None else count(float(run.flops_per_token)),
        count(run.words),
        number(run.bits_per_byte, ".4f"),
        number(run.best_bits_per_byte, ".4f"),
        number(run.best_step),
        duration(run.training_seconds),
        duration(run.wall_seconds),
        run.hardware or "–",
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


def _page(runs: Sequence[RunRecord], table: Table, folder: Path) -> Page:
    page = Page(folder.absolute().name, "Every run, in the order in which they were started")
    done = sum(run.is_done for run in runs)
    machines = dict.fromkeys(run.hardware for run in runs if run.hardware is not None)
    facts = {"runs": len(runs), "done": done, "wall clock of all": duration(sum(run.wall_seconds for run in runs))}
    page.facts(facts | ({"hardware": "; ".join(machines)} if machines else {}))
    scores = {at: run.bits_per_byte for at, run in enumerate(runs) if run.is_done and run.bits_per_byte is not None}
    page.table(table.columns, table.rows, best=min(scores, key=scores.__getitem__) if scores else None)
    page.text(
        "Columns after the first are the keys in which recipes differ. Bits per byte are of the last validation; the "
        "best validation and its step are beside it, since a run that has become worse was trained too long. Training "
        "is the time of steps alone, and wall clock has validation, samples and saving in it."
    )
    for run in runs:
        page.code(json.dumps(run.recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {run.name}")
    page.links({"The table as CSV, with every digit": f"{NAME}.csv", "The table as Markdown": f"{NAME}.md"})
    return page
