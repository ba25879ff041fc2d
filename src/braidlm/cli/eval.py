"""`braid eval`: scores."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from braidlm.core.errors import BraidError
    from braidlm.evals.babylm.answers import Written
    from braidlm.evals.reports.results import Evaluation

HELP = "score models on tasks; with --all-checkpoints, how a run learned them"
EPILOG = """examples:
  braid eval runs/moep blimp_fast --data ~/babylm
  braid eval runs/moep babylm_fast --data ~/babylm
  braid eval A B C blimp bits_per_byte --data bits_per_byte=dev.txt blimp=blimp/data
  braid eval runs/moep --harness hellaswag,piqa
  braid eval runs/moep runs/gpt2 blimp_fast --all-checkpoints --out dynamics
  braid eval runs/moep babylm_full glue_babylm --data ~/babylm --leaderboard submission

a word that is the name of a task, or of a suite of tasks (`braid list tasks`), is that; a model folder of such a name
is ./NAME
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.cli.settings import add_settings
    from braidlm.evals.scoring.contestant import Settings

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
    add(
        "--leaderboard",
        metavar="DIR",
        help="write answers and the file for the BabyLM 2025 leaderboard, adding to what is in DIR of the same models",
    )
    add("--ewok-text", action="store_true", help="with --leaderboard: also EWoK's, whose answers are its plain text")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="what products are computed in (float32)")
    add("--json", action="store_true", help="print facts for programs")
    add_settings(parser, Settings, "settings of tasks that have a use for them")


def run(args: argparse.Namespace) -> None:
    """Evaluate, then show the same as a table or as JSON."""
    from braidlm.cli.settings import given_settings
    from braidlm.core import console
    from braidlm.evals.evaluate import evaluate
    from braidlm.evals.scoring.contestant import Settings

    if args.json:
        console.set_quiet(True)
    harness = [name for name in (args.harness or "").split(",") if name]
    models, tasks = _sorted_out(args.words, bool(harness))
    root, own = _data(args.data or [])
    _check_leaderboard(args, tasks)
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
    written = _leaderboard(found, args) if args.leaderboard else None
    if args.json:
        console.show(json.dumps(found.facts(), ensure_ascii=False, indent=2))
    else:
        _show(found, args.out)
        if written is not None:
            _show_leaderboard(written, args.ewok_text)


def _sorted_out(words: list[str], harness: bool) -> tuple[list[str], list[str]]:
    """Models and tasks; a word that is neither is most probably a task misspelled."""
    from pathlib import Path

    from braidlm.core.errors import BraidError
    from braidlm.evals.suites import SUITES
    from braidlm.evals.tasks import TASKS

    known = [*TASKS, *SUITES]
    tasks = [word for word in words if word in known]
    models = [word for word in words if word not in known]
    for word in models:
        if not Path(word).exists():
            raise _unknown(word, known)
    if not models:
        raise BraidError("there is no model", todo="`braid eval MODEL ... TASK ...`: name a model folder or a run.")
    if not tasks and not harness:
        raise BraidError(
            "there is no task", todo=f"Name one or several (`braid list tasks` says what they are): {', '.join(known)}."
        )
    return models, tasks


def _unknown(word: str, tasks: list[str]) -> "BraidError":
    """A place that does not exist, if it looks like one; else most probably a task misspelled."""
    from difflib import get_close_matches
    from pathlib import Path

    from braidlm.core.errors import BraidError, did_you_mean

    place = Path(word)
    if len(place.parts) > 1:
        beside = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
        near = [f"{place.parent}/{name}" for name in get_close_matches(place.name, beside, n=1)]
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return BraidError(f"there is no model folder '{word}'.{hint}")
    if get_close_matches(word, tasks, n=1):
        return BraidError(f"there is no model folder and no task '{word}'.{did_you_mean(word, tasks)}")
    return BraidError(f"there is no model folder and no task '{word}'", todo="`braid list tasks` lists the tasks.")


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


def _check_leaderboard(args: argparse.Namespace, tasks: list[str]) -> None:
    """Before anything is scored: are there tasks that it wants, and is the place for them free?"""
    from pathlib import Path

    from braidlm.core.errors import BraidError
    from braidlm.evals.babylm.answers import check_babylm_tasks

    if args.leaderboard is None:
        if args.ewok_text:
            raise BraidError("this is of use only with --leaderboard", "--ewok-text")
        return
    check_babylm_tasks(tasks, args.all_checkpoints)
    if Path(args.leaderboard).exists() and not Path(args.leaderboard).is_dir():
        raise BraidError("this is not a folder", args.leaderboard, "Choose another folder for --leaderboard.")


def _leaderboard(found: "Evaluation", args: argparse.Namespace) -> "Written":
    from braidlm.evals.babylm.answers import write_babylm_results

    return write_babylm_results(found, args.leaderboard, ewok_text=args.ewok_text)


def _show_leaderboard(written: "Written", with_ewok: bool) -> None:
    """Where the file is that people submit, and what it still lacks."""
    from braidlm.core.console import show

    for path, missing in zip(written.collated, written.missing.values(), strict=True):
        show(str(path))
        if missing:
            show(f"  for the leaderboard it still lacks {', '.join(_in_short(missing))}")
        if "ewok" in missing and not with_ewok:
            show("  (the answers of EWoK are its plain text, and are written only with --ewok-text)")


def _in_short(missing: list[str]) -> list[str]:
    """Many checkpoints are a long list: the first, the last and how many."""
    checkpoints = [name for name in missing if name.startswith("checkpoint ")]
    others = [name for name in missing if name not in checkpoints]
    if len(checkpoints) < 4:
        return others + checkpoints
    first, last = (name.removeprefix("checkpoint ") for name in (checkpoints[0], checkpoints[-1]))
    return [*others, f"{len(checkpoints)} checkpoints ({first} to {last})"]


def _show(found: "Evaluation", out: str) -> None:
    from rich.markup import escape

    from braidlm.core.console import show, table
    from braidlm.core.report.page import Strong
    from braidlm.evals.reports.dynamics import run_dynamics
    from braidlm.evals.reports.folder import COMPARISON, PAGE
    from braidlm.evals.reports.page import best_sentence
    from braidlm.evals.reports.tables import FIXED, MARKED, columns, rows, run_columns, run_rows, too_long_lines
    from braidlm.evals.statistics.averages import averages

    def written(cell: str) -> str:
        return f"[bold]{escape(cell)} *[/bold]" if isinstance(cell, Strong) else escape(cell)

    heading = columns(found)
    kept = len(heading) - len(found.tasks) - len(averages(found)) if found.runs else FIXED
    table([escape(name) for name in heading], [[written(cell) for cell in row] for row in rows(found)], keep=kept)
    if any(verdict.clear for verdict in found.verdicts.values()):
        show(f"* {MARKED}")
    for average in averages(found):
        show(f"{average.label}: {average.note}")
    for line in too_long_lines(found):
        show(line)
    if found.over_runs:
        show("over all checkpoints:")
        table([escape(name) for name in run_columns(found)], run_rows(found))
    for name, checkpoints in found.runs.items():
        show(best_sentence(run_dynamics(name, checkpoints)).replace("`", ""))
    show(f"{out}/{PAGE if found.runs else COMPARISON}")
