"""`braid generate`: text from a model, as it comes; or from several models, side by side."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from braidlm.cli.settings import add_sampling, add_switches, number, options_of
from braidlm.core.console import say, show, show_json, write
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Choices, CountOrZero, Layers, Length, Pauses, Probability
from braidlm.opening.names import check_names

HELP = "continue a text with a model, and show what may come next"
EPILOG = """examples:
  braid generate runs/mine "Once upon a time" --max-tokens 100 --seed 1
  braid generate runs/mine "Once upon a" --top-next 5 --max-tokens 1
  braid generate runs/both "Tom has 3 apples" --paths maths
  braid generate --prompts prompts.txt --models runs/mine runs/wider --out texts.html
"""
STANDARD_INPUT = "-"
USAGE = """%(prog)s MODEL PROMPT [PROMPT ...] [options]
       %(prog)s --prompts FILE --models MODEL [MODEL ...] [--out REPORT] [options]"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    add = parser.add_argument
    model = add("model", help="a model folder, a run, or one model of a study as STUDY/NAME")
    about = 'text to continue; "" lets the model begin, - reads standard input'
    prompts = add("prompt", nargs="+", metavar="prompt", help=about)
    model.required = prompts.required = False  # a prompt study has --models and --prompts instead
    about = "at most this many new tokens (default 100; in a study 40)"
    add("--max-tokens", type=number(Length), metavar="N", help=about)
    add_sampling(add, "text")
    about = "show the N most probable next tokens (default 0; in a study 3)"
    add("--top-next", type=number(CountOrZero), metavar="N", help=about)
    add("--pauses", type=number(Pauses), metavar="N", help="pause tokens after the prompt (default 0)")
    add_switches(add)
    early = parser.add_argument_group("early exit", "tokens that leave the model before its last layer").add_argument
    early("--exit-layer", type=number(Layers), metavar="N", help="leave after this layer, counted from 1")
    about = "leave once the most probable token has probability P: after --exit-layer, or else after any layer"
    early("--exit-confidence", type=number(Probability), metavar="P", help=about)
    about = (
        "draft N tokens by the layers up to --exit-layer (default: a quarter of them) and verify them by the "
        "others in one pass: the text is the whole model's, sooner"
    )
    early("--speculate", type=number(Choices), metavar="N", help=about)
    add("--device", help="auto, cpu, cuda, cuda:1 (default auto)")
    about = "the same prompts, continued by several models side by side"
    study = parser.add_argument_group("prompt study", about).add_argument
    study("--prompts", dest="file", metavar="FILE", help="a prompt a line, or .jsonl with `prompt` and `domain`")
    study("--models", nargs="+", metavar="MODEL", help="model folders, runs or studies")
    study("--out", metavar="REPORT", help="also write a report: .md, .html or .csv")


def run(args: argparse.Namespace) -> None:
    forms = "Either `braid generate MODEL PROMPT ...`, or `braid generate --prompts FILE --models MODEL ...`."
    if args.file is not None or args.models is not None:
        if args.model is not None or args.prompt:
            raise BraidError("a model or a prompt is given, and a prompt study (--prompts, --models) too", todo=forms)
        if args.file is None or args.models is None:
            missing = "--prompts FILE" if args.file is None else "--models MODEL ..."
            raise BraidError(f"a prompt study also needs {missing}", todo=forms)
        check_names(*args.models)
        _study(args)
        return
    if args.model is None:
        raise BraidError("there is no model and no prompt", todo=forms)
    if not args.prompt:
        raise BraidError("there is no prompt", todo='Give one; "" lets the model begin by itself.')
    if args.out is not None:
        raise BraidError("--out writes the report of a prompt study", todo=forms)
    check_names(args.model)
    _generate(args)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that both forms have; an omitted one keeps the function's default."""
    options = options_of(args, "model", "prompt", "file", "models", "out")
    return {name: value for name, value in options.items() if value is not None}


def _generate(args: argparse.Namespace) -> None:
    """Print texts: the first as it is generated, the others when it is complete."""
    from braidlm.core.report.rendering import show_report
    from braidlm.core.report.report import Table
    from braidlm.inspection.generate import generate

    prompts = [_standard_input() if prompt == STANDARD_INPUT else prompt for prompt in args.prompt]
    started = False

    def on_text(prompt: int, text: str) -> None:
        nonlocal started
        if prompt == 0:
            write(text if started else prompts[0] + text)
            started = True

    result = generate(args.model, prompts, **_options(args), on_text=on_text)
    show_json(asdict(result) | {"tokens_per_second": result.tokens_per_second})
    write("\n" if started else prompts[0] + "\n")
    for text in result.texts[1:]:
        show("\n" + text.prompt + text.text)
    for text in result.texts:
        if text.next:
            rows = [(repr(token.text), token.id, f"{token.probability:.1%}") for token in text.next]
            show("")
            show_report(Table(("token", "id", "probability"), rows, title=f"after {text.prompt[-40:]!r}"))
    reasons = {text.stopped for text in result.texts}
    if "limit" in reasons:
        say("(stopped at the longest text this model can read)")
    if reasons == {"end"}:
        say("(ended by the model, with its token for the end of a text)")
    if result.paths is not None:
        say(f"(active paths: {', '.join(result.paths)})")
    if result.without is not None:
        say(f"(without {', '.join(result.without)})")
    if result.mean_layer is not None:
        say(f"(left after layer {result.mean_layer:.4g}{'' if args.exit_confidence is None else ' on average'})")
    if result.accepted is not None:
        say(f"({result.accepted:.0%} of the drafted tokens were accepted)")
    tokens = sum(text.tokens for text in result.texts)
    counted = f"{tokens} token{'' if tokens == 1 else 's'}"
    say(f"({counted} in {result.seconds:.2f} s, {result.tokens_per_second:.0f} tokens/s on {result.device})")


def _standard_input() -> str:
    """What is piped in, without the line break that ends nearly every text."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", "standard input") from None


def _study(args: argparse.Namespace) -> None:
    """Print a block per prompt, with every model in it."""
    from braidlm.core.report.rendering import show_report
    from braidlm.inspection.generate import prompt_study, study_report

    options = _options(args) | {"out": args.out, "on_model": lambda name: say(f"{name} ...")}
    study = prompt_study(args.models, args.file, **options)
    show_json(asdict(study))
    show_report(study_report(study))
    if args.out is not None:
        say(f"Written to {args.out}.")
