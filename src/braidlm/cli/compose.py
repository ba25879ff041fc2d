"""`braid compose`: paths into one model."""

import argparse
from typing import Any

from braidlm.cli.settings import number, options_of
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import check_new_folder
from braidlm.model.config.ranges import Layers, LayersOrZero, Seed
from braidlm.opening.names import check_names

HELP = "make one model of several that were trained apart: parallel paths with a join, or averaged probabilities"
EPILOG = """examples:
  braid compose runs/stories runs/maths --out models/both --dry-run
  braid compose runs/stories runs/maths --join gumbel_v1 --freeze paths --out models/both
  braid compose runs/seed-1 runs/seed-2 --join average --out models/average
  braid compose runs/anna runs/bert --join "{kind: posterior, settle: 32}" --out models/owners
  braid compose runs/anna runs/bert --join modules --out models/owners
  braid compose A B C --names stories maths code --join "{kind: gumbel_v2, losses: {load_balance: 0.01}}" --out M

For owners who do not show each other their text: train a model of what all may see, let each owner train it on
with text of its own, and join these with posterior. Nothing is trained after that; with settle one model goes on alone
after so many tokens of a text, so that long texts cost little more than one model (docs/tutorials/owners.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "a model folder, a run, a study (all its models), or a decoder of transformers; one tokenizer for all"
    add("sources", nargs="+", metavar="PATH", help=about)
    add("--out", metavar="DIR", help="the folder to write; it must not exist yet")
    about = (
        'a kind, or "{kind: ..., option: ...}" (shared_linear); average, posterior and mixture keep the models '
        "as they are and average their probabilities; modules puts those that were inserted into one base side by side"
    )
    add("--join", default="shared_linear", metavar="JOIN", help=about)
    add(
        "--names",
        nargs="+",
        metavar="NAME",
        help="the paths' permanent names (the runs' or folders'); of modules NAME_1, NAME_2 ... (as inserted)",
    )
    about = "how often the paths are joined (the depth of the shallowest)"
    add("--layers", type=number(Layers), metavar="N", help=about)
    add("--blocks", type=number(LayersOrZero), metavar="N", help="fresh full-width blocks before and after (1)")
    about = (
        "what later training leaves as it is: paths (all that came from them), joins, blocks, modules (inserted ones), "
        "routers, embedding, head"
    )
    add("--freeze", nargs="+", default=(), metavar="PART", help=about)
    add("--start", metavar="START", help="joins and projections: mean of the paths, or random (mean)")
    add("--seed", type=number(Seed), default=1, metavar="N", help="of the fresh weights (1)")
    add("--dry-run", action="store_true", help="show what would come from where, and write nothing")


def run(args: argparse.Namespace) -> None:
    if args.out is not None or not args.dry_run:
        check_new_folder(args.out)
    check_names(*args.sources)
    from braidlm.edits.compose import compose

    folder = compose(**options_of(args) | {"join": read_join(args.join)})
    console.show_json({"model": folder, "sources": args.sources})
    if folder is not None:
        console.show(str(folder))


def read_join(text: str) -> Any:
    """A kind, or a mapping as in a recipe."""
    from braidlm.core.reading import parse_yaml

    try:
        return parse_yaml(text, f"--join {text}", expect=object)
    except BraidError as error:
        reason = " ".join(error.what.split())
        raise BraidError(f"this is neither a kind of join nor a mapping ({reason})", f"--join {text}") from None
