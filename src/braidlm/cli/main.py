"""The `braid` command: finds the verb, runs it, and turns a BraidError into a message and exit code 2."""

import argparse
import importlib
import os
import sys
from pkgutil import iter_modules
from typing import NoReturn

import braidlm.cli
from braidlm import __version__
from braidlm.cli.settings import common_options
from braidlm.core import console
from braidlm.core.errors import BraidError, did_you_mean, until_stopped
from braidlm.core.reading import system_error

ORDER = (
    "demo", "prepare", "train", "compose", "edit", "eval", "routes", "generate", "serve", "chat", "compare", "convert",
    "push", "show", "list", "completion",
)  # fmt: skip
"""The usual order of work, in which the help names verbs; a verb that is not in it comes after these."""
NO_VERBS = {"main", "settings"}


def find_verbs() -> tuple[str, ...]:
    """The files of this folder: `braid VERB` is `braidlm.cli.VERB`, imported only when it is needed."""
    names = sorted({file.name for file in iter_modules(braidlm.cli.__path__)} - NO_VERBS)
    return tuple(sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)))


VERBS = find_verbs()


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return until_stopped(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    console.print_any_name()
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb not in VERBS:
        if argv[:1] == [verb]:
            near = did_you_mean(argv[0], VERBS)
            console.error([f"there is no verb '{verb}'.{near}", "`braid --help` says what each does."])
            return 2
        verb = None
    try:
        return _run_verb(verb, argv)
    except BraidError as error:
        if "--debug" in argv:
            raise
        console.error(error.lines())
        return 2
    except BrokenPipeError:  # the process that reads our output has ended
        sys.stderr.close()
        return 0
    except OSError as error:  # a path that nobody looked at before it was used
        if "--debug" in argv or error.filename is None:
            raise
        console.error(system_error(error, os.fsdecode(error.filename)).lines())
        return 2


def _run_verb(verb: str | None, argv: list[str]) -> int:
    """Run a verb, which may look at its words before it knows all of its arguments; without one show the help."""
    if verb is not None and (look := getattr(importlib.import_module(f"braidlm.cli.{verb}"), "look", None)):
        look(argv[argv.index(verb) + 1 :])
    parser = make_parser(verb, arguments=verb is not None)
    args = _parse(parser, argv)
    if args.verb is None:
        parser.print_help()
        return 0
    console.set_quiet(args.quiet)
    console.set_verbose(args.verbose)
    with console.json_output(args.json):
        args.run(args)
    return 0


def make_parser(only: str | None = None, arguments: bool = True) -> argparse.ArgumentParser:
    """The parser of all verbs; with `only`, the others are known by name and not imported.

    The help that lists the verbs needs no `arguments`, some of which are slow to find.
    """
    common = common_options()
    parser = argparse.ArgumentParser(
        prog="braid",
        description="Small language models as parts: train, compose, grow, prune, look inside.",
        epilog="Begin with `braid demo` or `braid train tiny/llama`. `braid VERB --help` has options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"braid {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb in VERBS:
        if only is not None and verb != only:
            verbs.add_parser(verb)
            continue
        try:
            module = importlib.import_module(f"braidlm.cli.{verb}")
        except Exception as error:  # a verb that cannot be imported must not break the help of the others
            if only is not None:
                raise
            verbs.add_parser(verb, help=f"(does not load: {error})")
            continue
        sub = verbs.add_parser(verb, help=module.HELP, description=module.HELP, parents=[common])
        if examples := getattr(module, "EPILOG", None):
            sub.epilog, sub.formatter_class = examples, argparse.RawDescriptionHelpFormatter
        if arguments:
            module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments; `key=value` may also follow an option, where argparse does not look for positionals.

    A verb's first word, where it must be one of its kinds, is told as a wrong verb is.
    """
    own, word = _deepest(parser, argv[:1]), argv[1] if len(argv) > 1 else "-"
    kinds = None if own is parser else _kinds(own)
    if kinds is not None and not word.startswith("-") and word not in kinds:
        _refuse(own, f"there is no kind '{word}'.{did_you_mean(word, kinds)}")
    args, extra = parser.parse_known_args(argv)
    unknown = next((word.split("=")[0] for word in extra if word.startswith("-")), None)
    own = _deepest(parser, argv)
    if unknown is not None:
        near = did_you_mean(unknown, [option for option in own._option_string_actions if option.startswith("--")])
        _refuse(own, f"there is no option '{unknown}'.{near}")
    if extra and not hasattr(args, "overrides"):
        own.error(f"unrecognized arguments: {' '.join(extra)}")
    if extra:
        args.overrides = [*args.overrides, *extra]
    return args


def _refuse(parser: argparse.ArgumentParser, what: str) -> NoReturn:
    console.error([f"{parser.prog}: {what}", f"`{parser.prog} --help` says what each does."])
    raise SystemExit(2)


def _deepest(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.ArgumentParser:
    """The parser of a command line's verb, or of the kind of edit."""
    for word in argv:
        parser = (_kinds(parser) or {}).get(word, parser)
    return parser


def _kinds(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    """The verbs of the command, or the kinds of a verb that has some."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), None)


if __name__ == "__main__":
    sys.exit(main())
