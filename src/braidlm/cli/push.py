"""`braid push`: a model to the Hub."""

import argparse
from dataclasses import asdict

from braidlm.cli.settings import options_of
from braidlm.core.console import show_json
from braidlm.opening.names import check_names

HELP = "push a model to the Hugging Face Hub, with its card, licence and evaluation results"
EPILOG = """examples:
  braid push runs/mine my-org/tiny-stories --dry-run
  braid push runs/mine my-org/tiny-stories --licence apache-2.0 --language en
  braid push runs/mine tiny-stories --public --results evaluation/results.json
A new repository is private; --public makes it public. `hf auth login` logs in.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder, a run, or one model of a study as STUDY/NAME")
    add("name", metavar="NAME", help="its name on the Hub, ORG/NAME; without ORG it is yours")
    visible = parser.add_mutually_exclusive_group()
    about = "only you see it (default of a new one)"
    visible.add_argument("--private", dest="private", action="store_true", default=None, help=about)
    visible.add_argument("--public", dest="private", action="store_false", default=None, help="everybody sees it")
    add("--revision", metavar="BRANCH", help="push to this branch, which is made where there is none (main)")
    add("--message", metavar="TEXT", help="the commit's message")
    about = "what `braid eval` wrote; by default results of exactly this model in evaluation/, if there are some"
    add("--results", metavar="FILE", help=about)
    add("--licence", metavar="NAME", help="as the Hub writes it: apache-2.0, mit, cc-by-4.0")
    add("--language", nargs="+", metavar="CODE", help="the languages of its text: en, de")
    add("--tags", nargs="+", metavar="TAG", help="more tags for the card")
    add("--dry-run", action="store_true", help="show what would be pushed, and send nothing")


def run(args: argparse.Namespace) -> None:
    check_names(args.model)
    from braidlm.serving.push import push

    show_json(asdict(push(**options_of(args))))
