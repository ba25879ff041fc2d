"""The folder of a report: tables as CSV, figures as PNG, and a page."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_text
from braidlm.core.report import figures
from braidlm.core.report.heat_map import HeatMap, heat_maps
from braidlm.core.report.share_chart import share_chart
from braidlm.routes.gates_report import FILE_COLUMNS, domain_rows, file_rows, gate_figures
from braidlm.routes.layers import Layer
from braidlm.routes.measures import LayerTally
from braidlm.routes.page import routes_page
from braidlm.routes.report import MANY, ModelRoutes, RoutingReport, TokenView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "routes.html"


def check_out(out: Path | str) -> None:
    """Raise an error if the report could not be written: a folder of other files, or no matplotlib."""
    figures.check_drawing()
    out = Path(out)
    if out.exists() and not _is_report(out):
        raise BraidError(
            "this exists already and is not a report of `braid routes`", str(out), "Choose another folder for --out."
        )


def write_folder(report: RoutingReport, out: Path | str, back: str = "") -> Path:
    """Write everything in one step, replacing an older report; its page links `back` to the one that it belongs to."""
    drawn = report_figures(report)
    with atomic_folder(out, replace=True) as folder:
        for name, table in report_tables(report).items():
            write_text(folder / f"{name}.csv", table.csv())
        for name, figure in drawn.items():
            figures.save_png(figure, folder / f"{name}.png")
        routes_page(report, drawn, back).write(folder / PAGE)
    return Path(out) / PAGE


def _is_report(folder: Path) -> bool:
    """Whether a folder is empty, or holds a report and nothing else."""
    if not folder.is_dir():
        return False
    files = list(folder.iterdir())
    known = all(path.suffix in (".csv", ".png") or path.name == PAGE for path in files)
    return not files or (known and (folder / PAGE) in files)


@dataclass(frozen=True)
class Table:
    """Columns and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def csv(self) -> str:
        """Comma-separated values: nothing for None, `true` and `false`, numbers with six digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(value) for value in row] for row in self.rows)
        return text.getvalue()


def report_tables(report: RoutingReport) -> dict[str, Table]:
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
        "typical": (("layer", "choice", "tokens"), _typical),
        "tokens": (("text", "position", "token", "layer", "chosen", "weight", "others"), _tokens),
    }
    all_tables = {
        name: Table(("model", *columns), [(m.name, *row) for m in report.models for row in rows(m)])
        for name, (columns, rows) in makers.items()
    }
    gates = {"gates": (FILE_COLUMNS, file_rows), "gate_domains": (("layer", "domain", "relative"), domain_rows)}
    all_tables |= {
        name: Table(("model", *columns), [(m.name, *row) for m in report.gated for row in rows(m)])
        for name, (columns, rows) in gates.items()
    }
    return {name: table for name, table in all_tables.items() if table.rows}


def _summary(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for tally in model.tallies:
        for choice, share in tally.shares.items():
            yield tally.what, tally.decisions, choice, share, tally.accuracy, tally.accuracy_by_chance


def _decisions(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for prompt in model.prompts:
        for layer, chosen in zip(model.layers, prompt.chosen, strict=True):
            right = None if chosen is None or prompt.path is None else chosen == prompt.path
            yield prompt.name, prompt.domain, prompt.path, layer.name, layer.read_by, chosen, right


def _layers(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    read_by = {layer.name: layer.read_by for layer in model.layers}
    for tally in model.tallies:
        for one in tally.read:
            judged = (one.decisions, one.entropy, one.accuracy, one.accuracy_by_chance)
            information = (one.information, one.information_by_chance, one.p_value, one.domain_entropy)
            yield tally.what, one.layer, read_by[one.layer], *judged, *information


def _shares(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for tally in model.tallies:
        for one in tally.read:
            overall = ("all", one.shares, one.load, one.weight)
            by_domain = ((d, one.by_domain[d], one.load_by_domain[d], one.weight_by_domain[d]) for d in one.by_domain)
            for domain, shares, load, weight in (overall, *by_domain):
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
                if not by:
                    continue  # the token passes by
                (choice, weight), *others = by.items()
                yield name, position, token, layer.name, choice, weight, "; ".join(f"{n} {w:.3g}" for n, w in others)


def _typical(model: ModelRoutes) -> Iterator[tuple[Any, ...]]:
    for layer, typical in zip(model.layers, model.typical, strict=True):
        yield from ((layer.name, name, " ".join(map(repr, tokens))) for name, tokens in (typical or {}).items())


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else value


def report_figures(report: RoutingReport) -> dict[str, "Figure"]:
    """Figures by name."""
    drawn = gate_figures(report.gated) if report.gated else {}
    if report.models:
        drawn["shares"] = load_figure(report) if report.most_choices > MANY else share_figure(report)
    if (information := information_figure(report)) is not None:
        drawn["information"] = information
    return drawn


def load_figure(report: RoutingReport) -> "Figure":
    """Of each model and each kind of layer, the load of every choice in every layer, domains side by side."""
    lines: list[list[HeatMap]] = []
    for model in report.models:
        kinds: dict[tuple[str, int], list[tuple[Layer, LayerTally]]] = {}
        for layer, one in zip(model.layers, model.tallies[-1].layers, strict=True):
            if one is not None:
                kinds.setdefault((layer.part, len(layer.choices)), []).append((layer, one))
        for (part, size), layers in kinds.items():
            title = ", ".join(filter(None, (model.name if len(report.models) > 1 else "", part)))
            names = [name.removeprefix("expert_") for name in layers[0][0].choices]
            domains = dict.fromkeys(domain for _, one in layers for domain in one.load_by_domain)
            lines.append(
                [
                    HeatMap(
                        f"{title}: {domain}" if title else domain,
                        [layer.label.split()[1] for layer, _ in layers],
                        names,
                        [[share * size for share in one.load_by_domain[domain].values()] for _, one in layers],
                    )
                    for domain in domains
                ]
            )
    return heat_maps(lines, "load, 1 is an even share")


def share_figure(report: RoutingReport) -> "Figure":
    """For each layer and domain the weight of each choice, over all tokens; models side by side.

    Where a token takes one choice, the weight is how often it is taken.
    """
    panels = {model.name: _bars(model) for model in report.models}
    return share_chart(panels, report.choices, report.no_paths)


def information_figure(report: RoutingReport) -> "Figure | None":
    """For each layer and model, the bits that the choice gives about the domain; None without domains."""
    bits: dict[str, dict[str, float]] = {}
    for model in report.models:
        tally = model.tallies[-1]
        for layer, one in zip(model.layers, tally.layers, strict=True):
            if one is not None and one.information is not None:
                bits.setdefault(layer.label, {})[model.name] = one.information
    if not bits:
        return None
    label = f"bits about the domain, from {report.models[0].tallies[-1].what}"
    single = len(report.models) == 1
    return figures.bar_chart({at: next(iter(v.values())) for at, v in bits.items()} if single else bits, label)


def _bars(model: ModelRoutes) -> dict[tuple[str, str], dict[str, float]]:
    """The tally with most tokens is the last."""
    return {
        (layer.label, domain): shares
        for layer, one in zip(model.layers, model.tallies[-1].layers, strict=True)
        if one is not None
        for domain, shares in one.weight_by_domain.items()
    }
