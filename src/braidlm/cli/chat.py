"""`braid chat`: a conversation with a model in the terminal."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from braidlm.cli.settings import add_sampling, add_switches, number, options_of
from braidlm.core import console
from braidlm.core.errors import BraidError, Terminated, did_you_mean
from braidlm.model.config.ranges import Length
from braidlm.opening.names import check_names

if TYPE_CHECKING:
    from braidlm.serving.chat import Chat

HELP = "talk with a model in the terminal; a model without a chat template continues what you write"
EPILOG = """examples:
  braid chat runs/mine
  braid chat HuggingFaceTB/SmolLM2-135M-Instruct --system "You are a pirate." --temperature 0.7
  braid chat runs/both --paths maths --greedy
  printf 'Once upon a time\\nTom has 3 apples\\n' | braid chat runs/mine
In the conversation: /reset begins anew, /system TEXT says who the model is, /help lists them. Ctrl+C stops an answer,
Ctrl+D ends.
"""
COMMANDS = {
    "/reset": "begin anew; the model forgets what was said",
    "/system": "/system TEXT tells the model who it is; without TEXT it forgets that",
    "/help": "show this",
    "/exit": "end, as Ctrl+D does",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder, a run, one model of a study as STUDY/NAME, or ORG/NAME")
    add("--system", metavar="TEXT", help="what the model is told before the conversation")
    about = "at most this many new tokens of an answer (default: the model's limit; 100 without a chat template)"
    add("--max-tokens", type=number(Length), metavar="N", help=about)
    add_sampling(add, "answers")
    add_switches(add)
    parser.set_defaults(without=[])
    about = "switch off these gates, as `layer 2`"
    add("--gates-off", nargs="+", action="extend", default=[], metavar="GATE", help=about)
    about = "only these members of an average or a posterior"
    add("--members", nargs="+", action="extend", metavar="MEMBER", help=about)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")


def run(args: argparse.Namespace) -> None:
    check_names(args.model)
    from braidlm.serving.chat import chat

    asks = sys.stdin.isatty()
    with chat(**options_of(args)) as talk:
        if talk.template is None:
            what = "the model's tokenizer has no chat template: it continues each text by itself, and remembers none"
            console.say(what[0].upper() + what[1:] + ".") if asks else console.warn(what)
        if asks:
            name, device = talk.engine.opened.name, talk.engine.facts["device"]
            console.say(f"{name} on {device}. Ctrl+C stops an answer, Ctrl+D ends, /help lists commands.")
        for line in _lines(asks):
            if line == "/exit":
                break
            try:
                if line.startswith("/"):
                    _command(talk, line)
                else:
                    _answer(talk, line)
            except Terminated:
                raise
            except (BraidError, KeyboardInterrupt) as error:  # Ctrl-C ends an answer, and not the conversation
                if not asks:
                    raise
                if isinstance(error, BraidError):
                    console.error(error.lines())
        console.show_json({"model": str(talk.engine.opened.folder), "answers": [asdict(one) for one in talk.answers]})


def _lines(asks: bool) -> Iterator[str]:
    """What the user writes: a prompt a line."""
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` then has a history, and keys to edit a line
    while True:
        try:
            line = input("> ") if asks else sys.stdin.readline()
        except EOFError:
            console.write("\n")
            return
        except UnicodeDecodeError as error:
            what = f"this is not UTF-8 text ({error.reason} at byte {error.start})"
            raise BraidError(what, "standard input") from None
        except Terminated:
            raise
        except KeyboardInterrupt:
            if not asks:
                raise
            console.write("\n")
            continue
        if not (line or asks):
            return
        if line := line.strip("\r\n"):
            yield line


def _command(talk: "Chat", line: str) -> None:
    name, _, text = line.partition(" ")
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        talk.system = text.strip() or None
    elif name == "/help":
        for command, about in COMMANDS.items():
            console.say(f"{command:8} {about}")
    else:
        hint = did_you_mean(name, COMMANDS)
        raise BraidError(f"there is no command '{name}'.{hint}", todo="A text that begins with / has a space before.")


def _answer(talk: "Chat", line: str) -> None:
    try:
        stopped = talk.answer(line, console.write).stopped
    except KeyboardInterrupt:
        console.write("\n")
        raise
    console.write("\n")
    if stopped == "limit":
        console.say("(stopped at the longest text that this model can read; /reset begins anew)")
