"""`braid routes`: who goes where."""

import argparse
from typing import TYPE_CHECKING, Any

from braidlm.cli.numbers import number
from braidlm.cli.settings import add_switches, options_of
from braidlm.core.console import show, show_json, table
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, Probability

if TYPE_CHECKING:
    from braidlm.routes.gates import ModelGates
    from braidlm.routes.measures import LayerTally
    from braidlm.routes.report import ModelRoutes, PromptRoutes, RoutingReport

HELP = "who goes where: which paths or experts tokens take in each layer; and what gates do"
MAX_NAMES = 50
"""With names of choices that together are longer than this, a table shows only the most and the least used."""
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
    add(
        "--prompts",
        metavar="FILE",
        help="a prompt a line, or JSONL with prompt and domain (papaformer: its 20 prompts)",
    )
    add(
        "--data", nargs="+", action="extend", metavar="NAME=PATH", help="packed folders or text; the name is the domain"
    )
    add(
        "--held-out",
        type=number(Probability),
        metavar="SHARE",
        help="of packed data, only what `holdout: SHARE` keeps from training",
    )
    add(
        "--tokens",
        type=number(Count),
        default=20_000,
        metavar="N",
        help="at most this many tokens of each data set (20000)",
    )
    add("--domains", nargs="+", action="extend", metavar="DOMAIN=PATH", help="the path that should know a domain")
    add_switches(add)
    add("--out", metavar="DIR", help="write tables (CSV), pictures (PNG) and routes.html")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")


def run(args: argparse.Namespace) -> None:
    """Collect the routes, then show them as tables or as JSON."""
    from braidlm.routes.routes import routes

    pairs = {"data": _pairs(args.data, "--data"), "domains": _pairs(args.domains, "--domains")}
    report = routes(**options_of(args) | pairs)
    show_json(report.facts())
    _show(report)
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


def _show(report: "RoutingReport") -> None:
    from braidlm.routes.report import RoutingReport, verdicts

    if report.models and report.models[0].prompts:
        _show_prompts(report)
    if report.models:
        _show_shares(report)
    for model in report.models:
        _show_layers(model, RoutingReport([model]).choices)
        for line in (*model.findings, *verdicts(model), *(f"note: {note}" for note in model.notes)):
            show(line)
        show("")
    for gates in report.gated:
        _show_gates(gates)


def _show_gates(model: "ModelGates") -> None:
    """Per layer: activations with and without its gate, and how far the gate has moved from zero."""
    from braidlm.routes.gates_report import gate_columns, gate_rows

    show(f"{model.name}: its gates ({model.kind}) over {model.tokens:,} tokens")
    show("(the size and the mean of activations after each layer, with and without its gate; the gate's output as a")
    show("share of the layer's, over all texts and by domain; by what factor the gate scales a random input)")
    table(gate_columns(model), gate_rows(model))
    for finding in model.findings:
        show(finding)
    show("")


def _show_prompts(report: "RoutingReport") -> None:
    """PaPaformer's Table 6: choices by number."""
    from rich.markup import escape

    numbers = {name: str(number) for number, name in enumerate(report.choices, 1)}
    rows = [
        (
            escape(prompt.name[:40]),
            escape(prompt.domain or "-"),
            *(_decisions(m.prompts[n], numbers) for m in report.models),
        )
        for n, prompt in enumerate(report.models[0].prompts)
    ]
    show("The choice at the last token of each prompt, layer by layer, and how many are right")
    show(f"({', '.join(f'{number} {name}' for name, number in numbers.items())})")
    table(("prompt", "domain", *(model.name for model in report.models)), rows)
    show("")


def _decisions(prompt: "PromptRoutes", numbers: dict[str, str]) -> str:
    chosen = " → ".join(numbers[choice] if choice else "·" for choice in prompt.chosen)
    return chosen if prompt.right is None else f"{chosen}  {prompt.right}/{prompt.read}"


def _show_shares(report: "RoutingReport") -> None:
    """Over all layers: what each choice has, a column for each model."""
    from braidlm.routes.report import capital, share_rows

    for at, tally in enumerate(report.models[0].tallies):
        if rows := share_rows(report, at):
            show(f"{capital(tally.what)}, over all layers")
            table(("", *(model.name for model in report.models)), rows)
            show("")


def _show_layers(model: "ModelRoutes", choices: list[str]) -> None:
    """What each layer did: the load of every choice, or of the most and least used of many."""
    from braidlm.routes.report import percent

    tally = model.tallies[-1]
    top_k = any(layer.top_k > 1 for layer in model.layers)
    many = sum(len(name) + 2 for name in choices) > MAX_NAMES
    rows: list[tuple[Any, ...]] = []
    for layer, one in zip(model.layers, tally.layers, strict=True):
        name = layer.label if top_k else layer.name  # there are many columns
        if one is None:
            rows.append((name, *["-"] * (2 if many else len(choices)), "-", "-", "-"))
            continue
        information = "-" if one.information is None else f"{one.information:.2f} of {one.domain_entropy:.2f}"
        rows.append((name, *_loads(one, choices, many), f"{one.entropy:.2f}", percent(one.accuracy), information))
    loads = "load of each choice; " if top_k else ""
    show(f"{model.name}: {tally.what} ({loads}entropy in bits; bits that the path tells about the domain)")
    table(("layer", *(("most used", "least used") if many else choices), "entropy", "right", "bits"), rows)


def _loads(one: "LayerTally", choices: list[str], many: bool) -> list[str]:
    from braidlm.routes.report import percent

    if not many:
        return [percent(one.load.get(choice)) for choice in choices]
    ranked = sorted(one.load, key=lambda name: -one.load[name])
    return [f"{name} {percent(one.load[name])}" for name in (ranked[0], ranked[-1])]
