"""`braid routes`: who goes where."""

import argparse

from braidlm.cli.settings import add_switches, number, options_of
from braidlm.core.console import show, show_json
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, Probability
from braidlm.opening.names import check_names

HELP = "who goes where: which paths or experts tokens take in each layer; and what gates do"
EPILOG = """examples:
  braid routes runs/gumbel
  braid routes A B C --prompts my-prompts.jsonl --out report
  braid routes M --data stories=data/stories maths=data/maths --held-out 0.01
  braid routes runs/gated --data maths=data/maths --out report
  braid routes M --domains stories=path_1 maths=path_2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="a model folder, a run, or a study (all its models)")
    about = "a prompt a line, or JSONL with prompt and domain (papaformer: its 20 prompts)"
    add("--prompts", metavar="FILE", help=about)
    about = "packed folders or text; the name is the domain"
    add("--data", nargs="+", action="extend", metavar="NAME=PATH", help=about)
    about = "of packed data, only what `holdout: SHARE` keeps from training"
    add("--held-out", type=number(Probability), metavar="SHARE", help=about)
    about = "at most this many tokens of each data set (20000)"
    add("--tokens", type=number(Count), metavar="N", help=about)
    add("--domains", nargs="+", action="extend", metavar="DOMAIN=PATH", help="the path that should know a domain")
    add_switches(add)
    add("--out", metavar="DIR", help="write tables (CSV) and routes.html")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")


def run(args: argparse.Namespace) -> None:
    pairs = {"data": _pairs(args.data, "--data"), "domains": _pairs(args.domains, "--domains")}
    check_names(*args.models)
    from braidlm.core.report.rendering import show_report
    from braidlm.inspection.routes import routes
    from braidlm.inspection.routes_report import short_report

    report = routes(**options_of(args) | pairs)
    show_json(report.facts())
    show_report(short_report(report))
    if args.out:
        show(f"{args.out}/routes.html")


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not (name and equals) or (option == "--data" and not value):
            raise BraidError(f"expected NAME=VALUE, got '{item}'", option)
        if name in pairs:
            raise BraidError(f"'{name}' is given twice", option)
        pairs[name] = value
    return pairs
