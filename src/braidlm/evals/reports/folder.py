"""The folder of an evaluation: results as JSON, Markdown, CSV and a page; of checkpoints also figures.

OUT/results.json, results.md, results.csv
OUT/results.html                            the models side by side
OUT/dynamics.html, dynamics.json, *.png     for all checkpoints of runs
OUT/babylm.json                             averages over the BabyLM tasks, where several of them were evaluated
OUT/kept/                                   cached results, so that nothing is scored twice
"""

from dataclasses import asdict
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json, write_text
from braidlm.core.report import figures
from braidlm.evals.reports.comparison_page import comparison_page
from braidlm.evals.reports.dynamics import run_dynamics
from braidlm.evals.reports.dynamics_figures import dynamics_figures
from braidlm.evals.reports.dynamics_page import dynamics_page
from braidlm.evals.reports.result_cache import FOLDER
from braidlm.evals.reports.tables import long_csv, markdown
from braidlm.evals.results import Evaluation

RESULTS, DYNAMICS, BABYLM = "results.json", "dynamics.json", "babylm.json"
PAGE, COMPARISON = "dynamics.html", "results.html"


def check_out(out: Path, draws: bool) -> None:
    """Raise an error, before anything is scored, if `out` holds other files or figures cannot be drawn."""
    if draws:
        figures.check_drawing()
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not any((out / name).exists() for name in (RESULTS, FOLDER))):
        raise BraidError(
            "this exists already and is not a folder of `braid eval`", str(out), "Choose another folder for --out."
        )


def write_folder(evaluation: Evaluation, out: Path) -> None:
    """Write all files; older results in the folder are overwritten, cached ones stay."""
    if evaluation.runs:
        drawn = dynamics_figures(evaluation)
        for name, figure in drawn.items():
            figures.save_png(figure, out / f"{name}.png")
        dynamics_page(evaluation, drawn).write(out / PAGE)
        runs = [run_dynamics(name, checkpoints) for name, checkpoints in evaluation.runs.items()]
        facts = [{**asdict(run), "mean": run.mean, "best": run.names[run.best]} for run in runs]
        write_json(out / DYNAMICS, {"format": 1, "runs": facts})
    else:
        comparison_page(evaluation).write(out / COMPARISON)
    if evaluation.averages:
        write_json(out / BABYLM, evaluation.averages)
    write_text(out / "results.md", markdown(evaluation))
    write_text(out / "results.csv", long_csv(evaluation))
    write_json(out / RESULTS, evaluation.facts())
