"""`braid eval`: scores."""

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from braidlm.cli.settings import add_cluster, add_settings, add_switches, given_settings, number
from braidlm.core.console import show, show_json
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.config.ranges import CountOrZero, Layers
from braidlm.opening.names import find_sources

HELP = "score models on tasks; with --all-checkpoints, how a run learned them"
EPILOG = """examples:
  braid eval runs/moep blimp_fast --data ~/babylm
  braid eval runs/moep babylm_fast --data ~/babylm
  braid eval A B C blimp bits_per_byte --data bits_per_byte=dev.txt blimp=blimp/data
  braid eval runs/owner memorisation --data owner=train.txt others=unseen.txt --reference runs/shared
  braid eval runs/moep --harness hellaswag,piqa
  braid eval runs/moep runs/gpt2 blimp_fast --all-checkpoints --out dynamics
  braid eval runs/modules bits_per_byte --data bits_per_byte=dev.txt --prune-text train.txt --out curve
  braid eval runs/skip bits_per_byte --data bits_per_byte=dev.txt --exits --out exits
  braid eval runs/moep babylm_full glue_babylm --data ~/babylm --leaderboard submission

a word that is the name of a task, or of a suite of tasks (`braid list tasks`), is that; a model folder of such a name
is ./NAME
"""
PREFIX = "prune_"
APART = ("paths", "without", "all_checkpoints", "leaderboard", "cluster")
"""Options that are of no use for curves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.edits.criteria import PruningOptions
    from braidlm.evals.evaluated_model import Settings

    add = parser.add_argument
    add("words", nargs="+", metavar="MODEL|TASK", help="model folders, runs or studies, and tasks or suites")
    about = "the folder with the tasks' data (default BRAID_DATA or data), or the data of a task, or one of its texts"
    add("--data", nargs="+", action="extend", metavar="DIR|NAME=PATH", help=about)
    add("--harness", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas between")
    add("--harness-tasks", metavar="DIR", help="task files (YAML) for it, which may read local data")
    add("--harness-shots", type=number(CountOrZero), metavar="N", help="examples that it shows before a question")
    add_switches(add)
    add("--all-checkpoints", action="store_true", help="every checkpoint of the runs, and learning dynamics")
    about = "score the models after each of these layers (default: every layer), as a curve"
    add("--exits", nargs="*", type=number(Layers), metavar="LAYER", help=about)
    about = "the folder of the results; what is already there is not scored again (evaluation)"
    add("--out", default="evaluation", metavar="DIR", help=about)
    about = "write answers and the file for the BabyLM 2025 leaderboard, adding to what is in DIR of the same models"
    add("--leaderboard", metavar="DIR", help=about)
    add("--ewok-text", action="store_true", help="with --leaderboard: also EWoK's, whose answers are its plain text")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="what products are computed in (float32)")
    add_cluster(parser)
    add_settings(parser, Settings, "settings of tasks that use them")
    add_settings(parser, PruningOptions, "curves of pruned models", PREFIX)


def run(args: argparse.Namespace) -> None:
    harness = [name for name in (args.harness or "").split(",") if name]
    models, tasks = _models_and_tasks(args.words, bool(harness))
    root, own = _data(args.data or [])
    from braidlm.core.report.rendering import show_report
    from braidlm.evals.babylm.predictions import write_babylm_results
    from braidlm.evals.evaluate import evaluate
    from braidlm.evals.evaluated_model import Settings
    from braidlm.evals.reports.dynamics import short_report

    _check_leaderboard(args, tasks)
    same = ("harness_tasks", "harness_shots", "out", "device", "dtype")
    options: dict[str, Any] = {name: getattr(args, name) for name in same}
    options |= {"data": root, "data_of": own, "harness": harness}
    options["settings"] = Settings(**given_settings(args, Settings))
    if (curves := _curves(args, models, tasks, options)) is not None:
        show_json(curves.facts())
        show_report(curves.table())
        show(f"{args.out}/{curves.name}.html")
        return
    apart = {name: getattr(args, name) for name in ("all_checkpoints", "paths", "without", "cluster")}
    evaluation = evaluate(models, tasks, **apart, **options)
    written = args.leaderboard and write_babylm_results(evaluation, args.leaderboard, ewok_text=args.ewok_text)
    show_json(evaluation.facts())
    show_report(short_report(evaluation))
    show(f"{args.out}/{'dynamics' if evaluation.runs else 'results'}.html")
    for path, missing in zip(written.collated, written.missing.values(), strict=True) if written else ():
        show(str(path))
        if missing:
            show(f"  for the leaderboard it still lacks {', '.join(_shortened(missing))}")
        if "ewok" in missing and not args.ewok_text:
            show("  (the answers of EWoK are its plain text, and are written only with --ewok-text)")


def _curves(args: argparse.Namespace, models: list[str], tasks: list[str], options: dict[str, Any]) -> Any:
    """The curves that the options ask for, of pruned models or of models after each layer; else None."""
    from braidlm.edits.criteria import PruningOptions
    from braidlm.evals.curves import exit_curve
    from braidlm.studies.prune_curve import prune_curve

    pruning = given_settings(args, PruningOptions, PREFIX)
    if not pruning and args.exits is None:
        return None
    if pruning and "text" not in pruning:
        raise BraidError(f"this needs --prune-text, the text that modules are used on: --prune-{next(iter(pruning))}")
    if mixed := [name for name in APART if getattr(args, name)]:
        asked = "--prune-text" if pruning else "--exits"
        raise BraidError(f"{asked} cannot be combined with --{mixed[0].replace('_', '-')}")
    if pruning:
        return prune_curve(models, tasks, PruningOptions(**pruning), **options)
    return exit_curve(models, tasks, args.exits or None, **options)


def _models_and_tasks(words: list[str], harness: bool) -> tuple[list[str], list[str]]:
    """Split the words into models and tasks; a word that is neither is most probably a misspelled task."""
    from braidlm.evals.tasks import TASKS
    from braidlm.evals.tasks.task import SUITES

    known = [*TASKS, *SUITES]
    tasks = [word for word in words if word in known]
    models = [word for word in words if word not in known]
    for word in models:
        if len(Path(word).parts) == 1 and not Path(word).exists():
            near = did_you_mean(word, known) if get_close_matches(word, known, n=1) else ""
            todo = None if near else "`braid list tasks` lists the tasks."
            raise BraidError(f"there is no model folder and no task '{word}'{near and '.'}{near}", todo=todo)
        find_sources(word, any_folder=True)  # an error that suggests the nearest name
    if not models:
        raise BraidError("there is no model", todo="`braid eval MODEL ... TASK ...`: name a model folder or a run.")
    if not tasks and not harness:
        what = "there is no task"
        raise BraidError(what, todo=f"Name one or several (`braid list tasks` says what they are): {', '.join(known)}.")
    return models, tasks


def _data(items: list[str]) -> tuple[str | None, dict[str, str]]:
    from braidlm.evals.tasks import TASKS

    roots, own = [], {}
    for item in items:
        name, equals, path = item.partition("=")
        if equals and (name in TASKS or any(name in TASKS[task].texts for task in TASKS)):
            own[name] = path
        else:
            roots.append(item)
    if len(roots) > 1:
        raise BraidError(f"several data folders are given: {', '.join(roots)}", "--data", "Give one, and TASK=PATH.")
    return (roots[0] if roots else None), own


def _check_leaderboard(args: argparse.Namespace, tasks: list[str]) -> None:
    """Check, before anything is scored, that there are BabyLM tasks and that the folder can be written."""
    from braidlm.evals.babylm.predictions import check_babylm_tasks

    if args.leaderboard is None:
        if args.ewok_text:
            raise BraidError("this is of use only with --leaderboard", "--ewok-text")
        return
    check_babylm_tasks(tasks, args.all_checkpoints)
    if Path(args.leaderboard).exists() and not Path(args.leaderboard).is_dir():
        raise BraidError("this is not a folder", args.leaderboard, "Choose another folder for --leaderboard.")


def _shortened(missing: list[str]) -> list[str]:
    """What a file to submit lacks; of many checkpoints the first, the last and how many."""
    checkpoints = [name for name in missing if name.startswith("checkpoint ")]
    others = [name for name in missing if name not in checkpoints]
    if len(checkpoints) < 4:
        return others + checkpoints
    first, last = (name.removeprefix("checkpoint ") for name in (checkpoints[0], checkpoints[-1]))
    return [*others, f"{len(checkpoints)} checkpoints ({first} to {last})"]
