"""`braid generate`: text from a model, as it comes."""

import argparse
import json
import sys
from dataclasses import asdict

HELP = "continue a text with a model, and show what may come next"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model folder, or a run folder (its newest checkpoint)")
    parser.add_argument("prompts", nargs="+", metavar="prompt", help='text to continue; "" lets the model begin')
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="most new tokens (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most probable token (default 0.8)")
    parser.add_argument("--top-k", type=int, metavar="N", help="choose among the N most probable tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among tokens that together have probability P")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--top-next", type=int, default=0, metavar="N", help="show the N likeliest tokens to follow")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    parser.add_argument("--json", action="store_true", help="print facts for programs")


def run(args: argparse.Namespace) -> None:
    """Print texts: the first live, the others, which are made with it, when it is complete."""
    from braidlm.core.console import say, show, table
    from braidlm.serving.generate import generate

    live = not args.json

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    begun = False

    def on_text(prompt: int, text: str) -> None:
        nonlocal begun
        if live and prompt == 0:
            write(text if begun else args.prompts[0] + text)
            begun = True

    result = generate(
        args.model,
        args.prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        greedy=args.greedy,
        top_next=args.top_next,
        device=args.device,
        on_text=on_text,
    )
    if args.json:
        show(json.dumps(asdict(result) | {"tokens_per_second": result.tokens_per_second}, ensure_ascii=False, indent=2))
        return
    write("\n" if begun else args.prompts[0] + "\n")
    for text in result.texts[1:]:
        show("\n" + text.prompt + text.text)
    for text in result.texts:
        if text.next:
            rows = [(repr(token.text), token.id, f"{token.probability:.1%}") for token in text.next]
            show("")
            table(("token", "id", "probability"), rows, title=f"after {text.prompt[-40:]!r}")
    limited = [text for text in result.texts if text.stopped == "limit"]
    if limited:
        say("(stopped at the longest text this model can read)")
    tokens = sum(text.tokens for text in result.texts)
    say(f"({tokens} tokens in {result.seconds:.1f} s, {result.tokens_per_second:.0f} tokens/s on {result.device})")
