"""`braid serve`: OpenAI's API for models, and a page to look inside them."""

import argparse
from typing import Any

from braidlm.cli.settings import number, options_of
from braidlm.core.console import say, show, show_json
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, CountOrZero, Length, NonNegative, Positive, Rows
from braidlm.opening.names import check_names

HELP = "serve models: OpenAI's API for programs, and a page to look inside"
EPILOG = """examples:
  braid serve runs/mine
  braid serve runs/mine runs/wider --open
  braid serve runs/ --keep 2
  braid serve runs/mine --host 0.0.0.0 --api-key "$KEY" --host-name models.example.org
"""
LIMITS = ("max_body", "max_seconds", "body_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "model folders, runs (the newest checkpoint), studies, folders of these, or ORG/NAME on the Hub"
    add("models", nargs="+", metavar="MODEL", help=about)
    add("--host", default="127.0.0.1", help="the address to listen at; another than this machine's own needs a key")
    add("--port", type=number(CountOrZero), default=8000, metavar="N", help="0 is any free one (8000)")
    add("--api-key", metavar="KEY", help="what clients must know (default: BRAID_API_KEY of the environment)")
    about = "other names that the server is reached by, behind a reverse proxy for example"
    add("--host-name", dest="host_names", nargs="+", action="extend", default=[], metavar="NAME", help=about)
    add("--open", dest="open_page", action="store_true", help="open the page in the browser")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    bounds = parser.add_argument_group("limits").add_argument
    about = "texts of a model that are continued at once (64)"
    bounds("--rows", type=number(Rows), default=64, metavar="N", help=about)
    about = "the longest text in tokens (default: the model's own limit)"
    bounds("--length", type=number(Length), metavar="N", help=about)
    bounds("--waiting", type=number(Count), default=256, metavar="N", help="texts that may wait for a row (256)")
    about = "models that stay in memory while nobody uses them (default: all that are named, at least 4)"
    bounds("--keep", type=number(Count), metavar="N", help=about)
    bounds("--max-body", type=number(Count), metavar="BYTES", help="the largest body of a request (4000000)")
    about = "until a text ends where it is (600)"
    bounds("--max-seconds", type=number(Positive), metavar="SECONDS", help=about)
    about = "that the body of a request may take to arrive (30)"
    bounds("--body-seconds", type=number(Positive), metavar="SECONDS", help=about)
    about = "that running requests have to end when the server is stopped (30)"
    bounds("--drain", type=number(NonNegative), default=30.0, metavar="SECONDS", help=about)


def run(args: argparse.Namespace) -> None:
    check_names(*args.models, any_folder=True)
    try:
        from braidlm.serving.api.safety import Limits
        from braidlm.serving.serve import Address, serve
    except ImportError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette", "prometheus_client", "pydantic", "h11"):
            raise
        raise BraidError(f"serving needs the package '{error.name}'", todo="pip install 'braidlm[serve]'") from None

    def told(address: Address) -> None:
        show_json({"url": address.url, "models": address.models, "api_key": address.has_key})
        show(f"The page: {address.url}")
        show(f"OpenAI's API: {address.url}v1 ({'with' if address.has_key else 'without'} an API key)")
        names = address.models
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        show(f"{'Models' if len(names) > 1 else 'Model'}: {', '.join(names[:20])}{more}")
        say("Ctrl+C stops it.")

    options: dict[str, Any] = options_of(args, *LIMITS)
    limits = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    serve(**options, limits=Limits(**limits), on_start=told)
