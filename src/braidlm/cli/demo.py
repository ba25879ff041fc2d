"""`braid demo`."""

import argparse
import shutil
import sys
from pathlib import Path

HELP = "the whole story, offline, in a few minutes: two paths trained apart, composed and compared; report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe `demo/paths`")
    add("--out", default="demo", metavar="DIR", help="where everything goes (default: demo)")


def run(args: argparse.Namespace) -> None:
    from braidlm.core import console
    from braidlm.studies.demo import demo

    report = demo(args.out, args.overrides)
    console.show_json({"report": report})
    # `make demo` runs a program that no PATH names.
    program = sys.argv[0] if Path(sys.argv[0]).name == "braid" and not shutil.which("braid") else "braid"
    console.show(f"The report: {report}\nThe page with its models, runs and reports: {program} serve {args.out} --open")
