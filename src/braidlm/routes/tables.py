"""The report as tables: plain rows, one file of comma-separated values each."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from braidlm.routes.report import ModelRoutes, RoutingReport, TokenView


@dataclass(frozen=True)
class Table:
    """Columns and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def csv(self) -> str:
        """As a file holds it: nothing for None, `true` and `false`, numbers with six digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(value) for value in row] for row in self.rows)
        return text.getvalue()


def tables(report: RoutingReport) -> dict[str, Table]:
    """Every table by its name, without those that would be empty."""
    makers: dict[str, tuple[Sequence[str], Callable[[ModelRoutes], Iterator[tuple[Any, ...]]]]] = {
        "summary": (("counted", "decisions", "choice", "share", "accuracy", "accuracy_by_chance"), _summary),
        "decisions": (("prompt", "domain", "path", "layer", "read_by", "chosen", "right"), _decisions),
        "layers": (
            (
                *("counted", "layer", "read_by", "decisions", "entropy", "accuracy", "accuracy_by_chance"),
                *("information", "information_by_chance", "luck", "domain_entropy"),
            ),
            _layers,
        ),
        "shares": (("counted", "layer", "domain", "choice", "share", "load", "weight"), _shares),
        "prompt_shares": (("prompt", "domain", "layer", "choice", "share"), _prompt_shares),
        "tokens": (("text", "position", "token", "layer", "chosen", "weight", "others"), _tokens),
    }
    found = {
        name: Table(("model", *columns), [(m.name, *row) for m in report.models for row in rows(m)])
        for name, (columns, rows) in makers.items()
    }
    return {name: table for name, table in found.items() if table.rows}


def _summary(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for tally in model.tallies:
        for choice, share in tally.shares.items():
            yield tally.what, tally.decisions, choice, share, tally.accuracy, tally.accuracy_by_chance


def _decisions(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for prompt in model.prompts:
        for layer, chosen in zip(model.layers, prompt.chosen, strict=True):
            right = None if chosen is None or prompt.path is None else chosen == prompt.path
            yield prompt.name, prompt.domain, prompt.path, layer.name, layer.how, chosen, right


def _layers(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    read_by = {layer.name: layer.how for layer in model.layers}
    for tally in model.tallies:
        for one in tally.read:
            judged = (one.decisions, one.entropy, one.accuracy, one.accuracy_by_chance)
            told = (one.information, one.information_by_chance, one.luck, one.domain_entropy)
            yield tally.what, one.layer, read_by[one.layer], *judged, *told


def _shares(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for tally in model.tallies:
        for one in tally.read:
            whole = ("all", one.shares, one.load, one.weight)
            apart = ((d, one.by_domain[d], one.load_by_domain[d], one.weight_by_domain[d]) for d in one.by_domain)
            for domain, shares, load, weight in (whole, *apart):
                for name, share in shares.items():
                    yield tally.what, one.layer, domain, name, share, load[name], weight[name]


def _prompt_shares(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for prompt in model.prompts:
        for layer, shares in zip(model.layers, prompt.shares, strict=True):
            yield from ((prompt.name, prompt.domain, layer.name, *pair) for pair in (shares or {}).items())


def _tokens(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    views: list[tuple[str, TokenView]] = [(prompt.name, prompt.view) for prompt in model.prompts]
    views += [(data.name, data.sample) for data in model.data]
    for name, view in views:
        for layer, served in zip(model.layers, view.served, strict=True):
            for position, (token, by) in enumerate(zip(view.tokens, served or [], strict=False)):
                (choice, weight), *others = by.items()
                yield name, position, token, layer.name, choice, weight, "; ".join(f"{n} {w:.3g}" for n, w in others)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else value
