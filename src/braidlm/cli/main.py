"""The `braid` command: finds the verb, runs it, and turns a BraidError into a message and exit code 2."""

import argparse
import importlib
import sys
from types import ModuleType

from braidlm import __version__

VERBS = ("demo", "prepare", "train", "generate", "convert", "show", "list")
"""In the order of a first day's work; `braid VERB` is `braidlm.cli.VERB`, imported only when it is needed."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help()
        return 0
    from braidlm.core import console
    from braidlm.core.errors import BraidError

    console.set_quiet(args.quiet)
    try:
        args.run(args)
    except BraidError as error:
        if args.debug:
            raise
        console.error(error.lines())
        return 2
    except KeyboardInterrupt:
        console.error(["interrupted"])
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
    return 0


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="show results and errors only")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="braid", description="Small language models as parts: train, compose, grow, prune, look inside."
    )
    parser.add_argument("--version", action="version", version=f"braid {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb in VERBS:
        module = _verb_module(verb)
        sub = verbs.add_parser(verb, help=module.HELP, description=module.HELP, parents=[common])
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def _verb_module(verb: str) -> ModuleType:
    return importlib.import_module(f"braidlm.cli.{verb}")


if __name__ == "__main__":
    sys.exit(main())
