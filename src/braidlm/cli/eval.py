"""`braid eval`: scores."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from braidlm.evals.results import Evaluation

HELP = "score models on tasks; with --all-checkpoints, how a run learned them"
EPILOG = """examples:
  braid eval runs/moep blimp_fast --data ~/babylm
  braid eval runs/moep babylm_fast --data ~/babylm
  braid eval A B C blimp bits_per_byte --data bits_per_byte=dev.txt blimp=blimp/data
  braid eval runs/moep --harness hellaswag,piqa
  braid eval runs/moep runs/gpt2 blimp_fast --all-checkpoints --out dynamics

a word that is the name of a task, or of a suite of tasks (`braid list tasks`), is that; a model folder of such a name
is ./NAME
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.cli.settings import add_settings
    from braidlm.evals.contestant import Settings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("words", nargs="+", metavar="MODEL|TASK", help="model folders or run folders, and tasks or suites")
    add(
        "--data",
        nargs="+",
        action="extend",
        metavar="DIR|TASK=PATH",
        help="the folder with the tasks' data (default BRAID_DATA or data), or the data of a task",
    )
    add("--harness", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas between")
    add("--harness-tasks", metavar="DIR", help="task files (YAML) for it, which may read local data")
    add("--harness-shots", type=int, metavar="N", help="examples that it shows before a question")
    add("--paths", nargs="+", metavar="PATH", help="let only these paths of the models be heard")
    add("--all-checkpoints", action="store_true", help="every checkpoint of the runs, and learning dynamics")
    add(
        "--out",
        default="evaluation",
        metavar="DIR",
        help="where results go, and are found again when asked for twice (evaluation)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="what products are computed in (float32)")
    add("--json", action="store_true", help="print facts for programs")
    add_settings(parser, Settings, "settings of tasks that have a use for them")


def run(args: argparse.Namespace) -> None:
    """Evaluate, then show the same as a table or as JSON."""
    from braidlm.cli.settings import given_settings
    from braidlm.core import console
    from braidlm.evals.contestant import Settings
    from braidlm.evals.evaluate import evaluate

    if args.json:
        console.set_quiet(True)
    harness = [name for name in (args.harness or "").split(",") if name]
    models, tasks = _sorted_out(args.words, bool(harness))
    root, own = _data(args.data or [])
    found = evaluate(
        models,
        tasks,
        data=root,
        data_of=own,
        harness=harness,
        harness_tasks=args.harness_tasks,
        harness_shots=args.harness_shots,
        all_checkpoints=args.all_checkpoints,
        paths=args.paths,
        settings=given_settings(args, Settings),
        out=args.out,
        device=args.device,
        dtype=args.dtype,
    )
    if args.json:
        console.show(json.dumps(found.facts(), ensure_ascii=False, indent=2))
    else:
        _show(found, args.out)


def _sorted_out(words: list[str], harness: bool) -> tuple[list[str], list[str]]:
    """Models and tasks; a word that is neither is most probably a task misspelled."""
    from pathlib import Path

    from braidlm.core.errors import BraidError, did_you_mean
    from braidlm.evals.suites import SUITES
    from braidlm.evals.tasks import TASKS

    known = [*TASKS, *SUITES]
    tasks = [word for word in words if word in known]
    models = [word for word in words if word not in known]
    for word in models:
        if not Path(word).exists():
            raise BraidError(f"there is no model folder and no task '{word}'.{did_you_mean(word, known)}")
    if not models:
        raise BraidError("there is no model", todo="`braid eval MODEL ... TASK ...`: name a model folder or a run.")
    if not tasks and not harness:
        raise BraidError("there is no task", todo=f"Name one or several of: {', '.join(TASKS)}.")
    return models, tasks


def _data(given: list[str]) -> tuple[str | None, dict[str, str]]:
    """The data folder, and what is given for single tasks."""
    from braidlm.core.errors import BraidError
    from braidlm.evals.tasks import TASKS

    roots, own = [], {}
    for item in given:
        name, equals, place = item.partition("=")
        if equals and name in TASKS:
            own[name] = place
        else:
            roots.append(item)
    if len(roots) > 1:
        raise BraidError(f"several data folders are given: {', '.join(roots)}", "--data", "Give one, and TASK=PATH.")
    return (roots[0] if roots else None), own


def _show(found: "Evaluation", out: str) -> None:
    from rich.markup import escape

    from braidlm.core.console import show, table
    from braidlm.core.page import Strong
    from braidlm.evals.dynamics import run_dynamics
    from braidlm.evals.folder import COMPARISON, PAGE
    from braidlm.evals.page import best_sentence
    from braidlm.evals.tables import MARKED, columns, rows, run_columns, run_rows

    def written(cell: str) -> str:
        return f"[bold]{escape(cell)} *[/bold]" if isinstance(cell, Strong) else escape(cell)

    table([escape(name) for name in columns(found)], [[written(cell) for cell in row] for row in rows(found)])
    if any(verdict.clear for verdict in found.verdicts.values()):
        show(f"* {MARKED}")
    if found.over_runs:
        table([escape(name) for name in run_columns(found)], run_rows(found), "over all checkpoints")
    for name, checkpoints in found.runs.items():
        show(best_sentence(run_dynamics(name, checkpoints)).replace("`", ""))
    show(f"{out}/{PAGE if found.runs else COMPARISON}")
