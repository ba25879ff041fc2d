"""`braid compare`: several recipes on identical batches."""

import argparse
from pathlib import Path

from braidlm.core import console

HELP = "train several recipes on identical batches: one table of cost, speed and bits per byte, and a page"
EPILOG = """examples:
  braid compare tiny/llama mine.yaml training.budget="200 steps" --out runs/attention
  braid compare A.yaml B.yaml C.yaml seed=2 --out runs/three
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a recipe's name (see `braid list recipes`) or FILE.yaml")
    add("overrides", nargs="*", metavar="RECIPE|key=value", help="the others, and changes to all of them")
    add("--out", metavar="DIR", default="runs/compare", help="the folder of the runs and the page (runs/compare)")
    add("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    add("--fresh", action="store_true", help="remove what the run folders hold and start over")


def run(args: argparse.Namespace) -> None:
    """Train what is not there yet, then show the table or the JSON."""
    from rich.markup import escape

    from braidlm.studies.comparing.compare import compare
    from braidlm.studies.comparing.report import PAGE, comparison_columns, comparison_rows

    others = [word for word in args.overrides if "=" not in word or Path(word).exists()]
    overrides = [word for word in args.overrides if word not in others]
    comparison = compare([args.recipe, *others], overrides, out=args.out, device=args.device, fresh=args.fresh)
    console.show_json(comparison.facts())
    columns, rows = comparison_columns(comparison), comparison_rows(comparison)
    console.table([escape(name) for name in columns], [[*map(escape, row)] for row in rows], keep=1)
    console.show(f"{args.out}/{PAGE}")
