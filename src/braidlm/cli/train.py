"""`braid train`."""

import argparse
from typing import Any

from braidlm.cli.settings import add_cluster
from braidlm.core import console
from braidlm.core.errors import BraidError, exit_code
from braidlm.core.recipes import compose_recipe, find_recipe, is_study

HELP = "train a model, or run a whole study, as a recipe says; the same command resumes after a stop"
EPILOG = """examples:
  braid train tiny/llama
  braid train tiny/llama name=mine data.sets.stories.source=texts training.budget="2000 steps"
  braid train mine.yaml start_from=models/both
  braid train mine.yaml seed=1,2,3 training.optimizer.lr=0.001,0.003 --multirun
  braid train tiny/taught --device cpu
  braid train papers/papaformer/phase2 --cluster ray:10.0.0.1:6379

the run is in runs/NAME, after the recipe's `name`; `out=DIR` is another folder
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a recipe's name (see `braid list recipes`) or FILE.yaml")
    about = "changes, e.g. training.batch=16 seed=2"
    add("overrides", nargs="*", default=[], metavar="key=value", help=about)
    add("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    parser.add_argument("--fresh", action="store_true", help="remove what the run folder holds and start over")
    parser.add_argument("--multirun", action="store_true", help="one run for each combination of key=a,b,c")
    add_cluster(parser)


def run(args: argparse.Namespace) -> None:
    """Compose the recipe once, and do what kind of recipe it is."""
    find_recipe(args.recipe)
    if args.multirun:
        _sweep(args)
        return
    data = compose_recipe(args.recipe, args.overrides)
    if is_study(data):
        _study(data, args)
    elif args.cluster is not None:
        todo = "A study or --multirun is several jobs; `torchrun` trains one model on several GPUs."
        raise BraidError("this recipe is one training", "--cluster", todo)
    else:
        _train(data, args)


def _train(data: dict[str, Any], args: argparse.Namespace) -> None:
    from braidlm.studies.run_page import write_run_page
    from braidlm.training.recipe import decode_recipe
    from braidlm.training.step.parallel import is_main_process
    from braidlm.training.train import train

    run = train(decode_recipe(data, args.recipe).as_dict(), device=args.device, fresh=args.fresh)
    if is_main_process():
        console.say(f"{run.progress.steps:,} steps, {run.progress.tokens:,} tokens, {run.progress.words:,} words.")
        if run.finished:
            console.say(f"Report: {write_run_page(run.folder)}")
        console.show(str(run.model))
        console.show_json(run.facts())
    if run.stopped_by is not None:
        raise SystemExit(exit_code(run.stopped_by))


def _study(data: dict[str, Any], args: argparse.Namespace) -> None:
    from braidlm.studies.decoding import decode_study
    from braidlm.studies.report import study

    results = study(decode_study(data), device=args.device, fresh=args.fresh, cluster=args.cluster)
    console.show(str(results.study.folder))
    console.show_json({"folder": results.study.folder, **results.as_dict()})


def _sweep(args: argparse.Namespace) -> None:
    from braidlm.studies.sweep import show_sweep, sweep, swept

    runs = sweep(args.recipe, args.overrides, device=args.device, fresh=args.fresh, cluster=args.cluster)
    show_sweep(runs)
    console.show_json({"runs": [record.run_facts() for record in swept(runs)]})
    if failed := [run.label for run in runs if run.failed]:
        raise BraidError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")
