"""The folder of an evaluation: results as JSON, Markdown, CSV and a page; of checkpoints also pictures.

OUT/results.json, results.md, results.csv
OUT/results.html                            the models side by side
OUT/dynamics.html, dynamics.json, *.png     for all checkpoints of runs
OUT/babylm.json                             averages over the BabyLM tasks, where several of them were evaluated
OUT/kept/                                   single results, so that nothing is scored twice
"""

from dataclasses import asdict
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json, write_text
from braidlm.core.report import figures
from braidlm.evals.babylm.average import babylm_averages, facts_of
from braidlm.evals.reports.comparison_page import comparison_page
from braidlm.evals.reports.dynamics import run_dynamics
from braidlm.evals.reports.keeping import FOLDER
from braidlm.evals.reports.page import dynamics_page
from braidlm.evals.reports.pictures import pictures
from braidlm.evals.reports.results import Evaluation
from braidlm.evals.reports.tables import long_csv, markdown

RESULTS, DYNAMICS, BABYLM = "results.json", "dynamics.json", "babylm.json"
PAGE, COMPARISON = "dynamics.html", "results.html"


def check_out(out: Path, draws: bool) -> None:
    """Say at once what would keep results from being written: a folder of other things, or no way to draw."""
    if draws:
        figures.check_drawing()
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not any((out / name).exists() for name in (RESULTS, FOLDER))):
        raise BraidError(
            "this exists already and is not a folder of `braid eval`", str(out), "Choose another folder for --out."
        )


def write_folder(found: Evaluation, out: Path) -> None:
    """Write everything; what older results of this folder said gives way, what was kept stays."""
    if found.runs:
        drawn = pictures(found)
        for name, figure in drawn.items():
            figures.save_png(figure, out / f"{name}.png")
        dynamics_page(found, drawn).write(out / PAGE)
        runs = [run_dynamics(name, checkpoints) for name, checkpoints in found.runs.items()]
        facts = [{**asdict(run), "mean": run.mean, "best": run.names[run.best]} for run in runs]
        write_json(out / DYNAMICS, {"format": 1, "runs": facts})
    else:
        comparison_page(found).write(out / COMPARISON)
    averages = babylm_averages(found)
    if averages:
        write_json(out / BABYLM, facts_of(averages))
    write_text(out / "results.md", markdown(found))
    write_text(out / "results.csv", long_csv(found))
    write_json(out / RESULTS, found.facts())
