"""`braid demo`."""

import argparse

HELP = "the whole story, offline, in a few minutes: two paths trained apart, composed and compared; report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe `demo/paths`"
    )
    parser.add_argument("--out", default="demo", metavar="DIR", help="where everything goes (default: demo)")


def run(args: argparse.Namespace) -> None:
    from braidlm.core import console
    from braidlm.studies.demo import demo

    report = demo(args.out, args.overrides)
    console.show_json({"report": report})
    console.show(f"Open {report} in a browser, or see the models at work beside it: braid serve {args.out}")
