"""Every number of `braid routes` for programs: a CSV file for each table."""

from collections.abc import Callable, Iterator
from typing import Any

from braidlm.core.report.report import Table
from braidlm.inspection.gates import ModelGates
from braidlm.inspection.results import ModelRoutes, RoutingReport

Row = tuple[Any, ...]


def data_tables(result: RoutingReport) -> list[Table]:
    """All tables, without those that would be empty; numbers have six digits."""
    tables = []
    for name, (columns, rows) in (ROUTES | GATES).items():
        models: list[Any] = result.models if name in ROUTES else result.gated
        body = [[model.name, *row] for model in models for row in rows(model)]
        rounded = [[f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in body]
        tables += [Table(["model", *columns.split()], rounded, name=name)] if body else []
    return tables


def _summary(model: ModelRoutes) -> Iterator[Row]:
    for tally in model.tallies:
        for choice, share in tally.shares.items():
            yield tally.what, tally.decisions, choice, share, tally.accuracy, tally.accuracy_by_chance


def _decisions(model: ModelRoutes) -> Iterator[Row]:
    for prompt in model.prompts:
        for layer, chosen in zip(model.layers, prompt.chosen, strict=True):
            right = None if chosen is None or prompt.path is None else chosen == prompt.path
            yield prompt.name, prompt.domain, prompt.path, layer.name, layer.read_by, chosen, right


def _layers(model: ModelRoutes) -> Iterator[Row]:
    read_by = {layer.name: layer.read_by for layer in model.layers}
    for tally in model.tallies:
        for one in tally.read:
            judged = (one.decisions, one.entropy, one.accuracy, one.accuracy_by_chance)
            information = (one.information, one.information_by_chance, one.p_value, one.domain_entropy)
            yield tally.what, one.layer, read_by[one.layer], *judged, *information


def _shares(model: ModelRoutes) -> Iterator[Row]:
    for tally in model.tallies:
        for one in tally.read:
            overall = ("all", one.shares, one.load, one.weight)
            by_domain = ((d, one.by_domain[d], one.load_by_domain[d], one.weight_by_domain[d]) for d in one.by_domain)
            for domain, shares, load, weight in (overall, *by_domain):
                for name, share in shares.items():
                    yield tally.what, one.layer, domain, name, share, load[name], weight[name]


def _prompt_shares(model: ModelRoutes) -> Iterator[Row]:
    for prompt in model.prompts:
        for layer, shares in zip(model.layers, prompt.shares, strict=True):
            yield from ((prompt.name, prompt.domain, layer.name, *pair) for pair in (shares or {}).items())


def _typical(model: ModelRoutes) -> Iterator[Row]:
    for layer, typical in zip(model.layers, model.typical, strict=True):
        yield from ((layer.name, name, " ".join(map(repr, tokens))) for name, tokens in (typical or {}).items())


def _tokens(model: ModelRoutes) -> Iterator[Row]:
    views = [(prompt.name, prompt.view) for prompt in model.prompts] + [(data.name, data.sample) for data in model.data]
    for name, view in views:
        for layer, served in zip(model.layers, view.served, strict=True):
            for position, (token, by) in enumerate(zip(view.tokens, served or [], strict=False)):
                if not by:
                    continue  # the token passes by
                (choice, weight), *others = by.items()
                yield name, position, token, layer.name, choice, weight, "; ".join(f"{n} {w:.3g}" for n, w in others)


ROUTES: dict[str, tuple[str, Callable[[Any], Iterator[Row]]]] = {
    "summary": ("counted decisions choice share accuracy accuracy_by_chance", _summary),
    "decisions": ("prompt domain path layer read_by chosen right", _decisions),
    "layers": (
        "counted layer read_by decisions entropy accuracy accuracy_by_chance information information_by_chance luck "
        "domain_entropy",
        _layers,
    ),
    "shares": ("counted layer domain choice share load weight", _shares),
    "prompt_shares": ("prompt domain layer choice share", _prompt_shares),
    "typical": ("layer choice tokens", _typical),
    "tokens": ("text position token layer chosen weight others", _tokens),
}
_NUMBERS = "layer activation activation_without mean mean_without relative gain"
GATES: dict[str, tuple[str, Callable[[ModelGates], Iterator[Row]]]] = {
    "gates": (_NUMBERS, lambda model: (tuple(getattr(one, name) for name in _NUMBERS.split()) for one in model.layers)),
    "gate_domains": (
        "layer domain relative",
        lambda model: ((one.layer, *pair) for one in model.layers for pair in one.by_domain.items()),
    ),
}
