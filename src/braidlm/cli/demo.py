"""`braid demo`."""

import argparse

HELP = "train a small model on the built-in stories, offline, in a few minutes, and write report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe `demo/stories`")
    parser.add_argument("--out", default="demo", metavar="DIR", help="where everything goes (default: demo)")


def run(args: argparse.Namespace) -> None:
    from braidlm.cli.demo_story import demo
    from braidlm.core import console

    report = demo(args.out, args.overrides)
    console.show(f"Open {report} in a browser.")
