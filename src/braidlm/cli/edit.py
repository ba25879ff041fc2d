"""`braid edit`: a new model of one."""

import argparse
from collections.abc import Sequence

from braidlm.cli.settings import add_settings, common_options, number, options_of
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Seed
from braidlm.opening.names import check_names

HELP = "make a new model of one: gate, select, insert, prune, share, factorize, quantize, sparsify, upcycle, withdraw"
EPILOG = """examples:
  braid edit insert runs/english --modules 4 --name german --router rows --out models/grown
  braid edit gate models/llama --kind vector --out adapters/maths
  braid edit select runs/gated --text maths.txt --rule smallest-change --out models/selected --report why
  braid edit prune runs/modules --text python.txt --threshold 0.01 --out models/small --dry-run
  braid edit prune models/big --text data/packed --keep 0.6 --out models/small
  braid edit prune models/dense --text data/packed --heads 4 --channels 256 --layers 6 --out models/small
  braid edit factorize runs/stories --energy 0.9 --text dev.txt --out models/narrow
  braid edit quantize runs/stories --scheme int8 --text dev.txt --out models/int8
  braid edit sparsify runs/stories --pattern 2:4 --text dev.txt --out models/sparse
  braid edit share runs/stories --what feeds --layers interior --lora 8 --out models/shared
  braid edit withdraw models/average --paths maths --out models/rest
  braid edit upcycle runs/stories --experts 4 --top-k 2 --out models/sparse
"""


def look(words: Sequence[str]) -> None:
    """Refuse a model that is not there before the kinds of edits are imported, whose options follow it."""
    if len(words) > 1 and not words[0].startswith("-") and not words[1].startswith("-"):
        check_names(words[1], bare=True, any_folder=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.edits.edit import edits, load_edits

    load_edits()
    kinds = parser.add_subparsers(dest="edit", metavar="KIND")
    common = common_options(default=argparse.SUPPRESS)
    for name in edits:
        sub = kinds.add_parser(name, help=edits[name].about, description=edits[name].about, parents=[common])
        sub.add_argument("model", metavar="MODEL", help="a model folder, a run, or one model of a study")
        sub.add_argument("--out", metavar="DIR", help="the folder to write; it must not exist yet")
        sub.add_argument("--seed", type=number(Seed), default=1, metavar="N", help="of fresh weights (1)")
        sub.add_argument("--dry-run", action="store_true", help="show what would come from where, and write nothing")
        add_settings(sub, edits[name], f"options of {name}")


def run(args: argparse.Namespace) -> None:
    from braidlm.edits.edit import edit, edits

    if args.edit is None:
        what = "there is no kind of edit"
        raise BraidError(what, todo=f"Name one: {', '.join(edits)}. `braid edit --help` says what each does.")
    folder = edit(args.edit, **options_of(args, "edit"))
    console.show_json({"model": folder, "source": args.model})
    if folder is not None:
        console.show(str(folder))
