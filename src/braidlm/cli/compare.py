"""`braid compare`: several recipes on identical batches, models of any kind on one text, or the table of runs."""

import argparse
from pathlib import Path

from braidlm.cli.settings import names_and_overrides, number
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.recipes import find_recipe
from braidlm.model.config.ranges import Count
from braidlm.opening.names import check_names

HELP = (
    "recipes on identical batches, models of any kind on one text, or runs: one table of cost and quality, and a page"
)
EPILOG = """examples:
  braid compare tiny/llama mine.yaml training.budget="200 steps" --out runs/attention
  braid compare A.yaml B.yaml C.yaml seed=2 --out runs/three
  braid compare runs/mine models/int8 models/pruned some-org/decoder --text dev.txt --out runs/sizes
  braid compare runs/sweep runs/alone --out runs/all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    recipe_help = (
        "a recipe's name (see `braid list recipes`) or FILE.yaml; or a model, with --text; or a folder of runs"
    )
    add("recipe", metavar="RECIPE", help=recipe_help)
    add("overrides", nargs="*", default=[], metavar="RECIPE|key=value", help="the others, and changes to all recipes")
    add("--out", metavar="DIR", default="runs/compare", help="the folder of the runs and the page (runs/compare)")
    about = "compare models, trained, edited or given: size on disk, speed and bits per byte of this text"
    add("--text", metavar="TEXT", help=about)
    add("--max-bytes", type=number(Count), metavar="N", help="with --text: score at most N bytes, in whole documents")
    add("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    add("--fresh", action="store_true", help="remove what the run folders hold and start over")


def run(args: argparse.Namespace) -> None:
    """Train what is not there yet, or measure or gather what is there; then show the table or the JSON."""
    others, overrides = names_and_overrides(args.overrides)
    if args.text is not None:
        _measure(args, [args.recipe, *others], overrides)
        return
    if args.max_bytes is not None:
        raise BraidError("this cuts a text, and there is none", "--max-bytes", "Name one: --text FILE.")
    folders = [word for word in (args.recipe, *others) if Path(word).is_dir()]
    if not folders:
        _compare(args, [args.recipe, *others], overrides)
    elif len(folders) == 1 + len(others) and not overrides and not args.fresh:
        _gather(args, folders)
    else:
        todo = "Give only folders, without overrides and --fresh; or only recipes, which are trained."
        raise BraidError("folders of runs are gathered as they are", ", ".join(folders), todo)


def _measure(args: argparse.Namespace, names: list[str], overrides: list[str]) -> None:
    if overrides or args.fresh:
        todo = "Leave out key=value and --fresh; without --text recipes are compared."
        raise BraidError("models are measured as they are", "--text", todo)
    check_names(*names)
    from braidlm.core.report.rendering import show_report
    from braidlm.studies.compare_models import NAME, compare_models, models_table

    compared = compare_models(names, args.text, args.out, args.max_bytes, args.device)
    console.show_json(compared.facts())
    show_report(models_table(compared.models))
    console.show(f"{args.out}/{NAME}.html")


def _gather(args: argparse.Namespace, folders: list[str]) -> None:
    from braidlm.studies.gather import PAGE, gather_runs, show_runs

    runs = gather_runs(folders, args.out)
    console.show_json({"runs": [run.run_facts() for run in runs]})
    show_runs(runs)
    console.show(f"{args.out}/{PAGE}")


def _compare(args: argparse.Namespace, recipes: list[str], overrides: list[str]) -> None:
    for recipe in recipes:
        find_recipe(recipe)
    from braidlm.core.report.rendering import show_report
    from braidlm.studies.compare import PAGE, compare, comparison_table

    comparison = compare(recipes, overrides, out=args.out, device=args.device, fresh=args.fresh)
    console.show_json(comparison.facts())
    show_report(comparison_table(comparison))
    console.show(f"{args.out}/{PAGE}.html")
