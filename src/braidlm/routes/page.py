"""The report as a page to read: routes.html."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from braidlm.core.report import figures
from braidlm.core.report.page import Mark, Page
from braidlm.routes.gates_report import add_gates, gates_page
from braidlm.routes.layers import Layer
from braidlm.routes.report import (
    MANY,
    ModelRoutes,
    PromptRoutes,
    RoutingReport,
    TokenView,
    capital,
    percent,
    share_rows,
    verdicts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VIEWS = 2
"""Prompts of each domain that are shown token by token where there is no data to show."""
WIDE = 4
"""With more columns of choices than this they are numbered, as in the paper, and not named."""
MAX_ROWS = 16
"""Layers of a text that are shown token by token; of more, FEW are."""
FEW = 6
"""Of many choices or layers, how many are shown."""
READ_BY = {"router": "its router", "cosine": "cosine", "shares": "the largest share", "": "cannot be read"}


def routes_page(report: RoutingReport, drawn: Mapping[str, "Figure"], back: str = "") -> Page:
    """The whole page, from the main results to the method; `back` is the page that it belongs to."""
    if not report.models:
        return gates_page(report.gated, drawn, back)
    page = Page("Who goes where", f"Which path the tokens of a text take in {_listed(report)}")
    if back:
        page.links({"Back to the report": back})
    _opening(page, report)
    page.heading("Layer by layer")
    caption = "The weight that routers give to each choice" if _top_k(report) else "How often each path is taken"
    if report.most_choices > MANY:
        caption = "How often each choice is taken: a row for each layer, a column for each choice"
    page.figure(figures.to_svg(drawn["shares"]), f"{caption}: {report.models[0].tallies[-1].what}.")
    if _top_k(report):
        _loads(page, report)
    if any(model.prompts for model in report.models):
        page.heading("Prompt by prompt")
        _grid(page, report)
    if "information" in drawn:
        page.heading(f"Does the {'path' if _has_paths(report) else 'choice'} tell what the text is about?")
        _information(page, report, figures.to_svg(drawn["information"]))
    if not _has_paths(report):
        page.heading("What each takes")
        _typical(page, report)
    page.heading("Token by token")
    _token_views(page, report)
    if report.gated:
        page.heading("Gates")
        add_gates(page, report.gated, drawn)
    page.heading("How this was read")
    _method(page, report)
    return page


def _listed(report: RoutingReport) -> str:
    names = [model.name for model in report.models]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _top_k(report: RoutingReport) -> bool:
    """Whether a token takes several choices in any layer."""
    return any(layer.top_k > 1 for model in report.models for layer in model.layers)


def _has_paths(report: RoutingReport) -> bool:
    return all(layer.of_paths for model in report.models for layer in model.layers)


def _opening(page: Page, report: RoutingReport) -> None:
    several = len(report.models) > 1
    first = report.models[0]
    looked_at = [f"{len(first.prompts)} prompts"] if first.prompts else []
    looked_at += [f"{data.tokens:,} tokens of {data.name}" for data in first.data]
    what = "In each parallel layer a token takes one of several paths."
    if _top_k(report) or not _has_paths(report):
        what = "Routers choose for each token a few of several paths or experts."
    page.text(
        f"{what} Here is which, for {', '.join(looked_at)}, and whether that has anything to do with what a text is "
        "about."
    )
    if several:
        _summary(page, report)
    else:
        page.facts(dict(_key_figures(first)))
    for model in report.models:
        if several:
            page.heading(model.name, 3)
        text = "\n\n".join(verdicts(model)) or "The texts have no domains, so there is nothing to judge this by."
        page.text(_with_code(text))
        if model.findings:
            page.text(" ".join(f"{_with_code(finding)}." for finding in model.findings))


def _key_figures(model: ModelRoutes) -> Iterator[tuple[str, Any]]:
    """Of the tally with most tokens; the shares of paths are in the figure below."""
    tally = model.tallies[-1]
    yield "decisions", tally.decisions
    if tally.accuracy is not None:
        yield "for the domain's path", percent(tally.accuracy)
        yield "would be by chance", percent(tally.accuracy_by_chance)
    if (used := _least_used(model)) is not None:
        yield "of an even share, least used", percent(used)
    for name, share in tally.shares.items():
        if name not in model.paths:
            yield f"for all paths {name}", percent(share)
    if (best := tally.most_informative) is not None:
        yield f"of {best.domain_entropy:.2f} bits of the domain", f"{best.information:.2f}"


def _summary(page: Page, report: RoutingReport) -> None:
    """The foot of PaPaformer's Table 6: a column for each model."""
    if rows := share_rows(report, 0):
        caption = f"What each choice has over all layers: {report.models[0].tallies[0].what}."
        page.table(["", *(model.name for model in report.models)], rows, caption)


def _least_used(model: ModelRoutes) -> float | None:
    """With top-k above 1: the smallest load of any choice in any layer, as a share of an even load."""
    read = zip(model.layers, model.tallies[-1].layers, strict=True)
    smallest = [
        min(one.load[name] for name in _active_choices(model, layer)) * len(_active_choices(model, layer))
        for layer, one in read
        if one is not None and layer.top_k > 1
    ]
    return min(smallest, default=None)


def _active_choices(model: ModelRoutes, layer: Layer) -> list[str]:
    """The choices of a layer that can be taken, without combinations of paths."""
    return [name for name in layer.active if not layer.of_paths or name in model.paths]


def _loads(page: Page, report: RoutingReport) -> None:
    """Of each layer the choices that are used most and least."""
    page.text(
        "Where a token takes several choices, load is a choice's share of all picks, and weight its share of the "
        "router's weights. The picture shows weights."
    )
    columns = ["", "choices", "even load", "most used", "load", "weight", "least used", "load", "weight"]
    rows = [row for model in report.models for row in _load_rows(model, len(report.models) > 1)]
    page.table(columns, rows, f"{capital(report.models[0].tallies[-1].what)}; `shares.csv` has every choice.")


def _load_rows(model: ModelRoutes, several: bool) -> Iterator[list[str]]:
    for layer, one in zip(model.layers, model.tallies[-1].layers, strict=True):
        if one is not None and layer.top_k > 1:
            names = sorted(_active_choices(model, layer), key=lambda name: -one.load[name])
            ends = ((name, percent(one.load[name]), percent(one.weight[name])) for name in (names[0], names[-1]))
            number = f"{layer.top_k} of {len(layer.choices)}"
            label = f"{model.name}, {layer.label}" if several else layer.label
            yield [label, number, percent(1 / len(names)), *(cell for end in ends for cell in end)]


def _grid(page: Page, report: RoutingReport) -> None:
    """PaPaformer's Table 6: a row for each prompt, a column for each layer of each model."""
    models = report.models
    cells = [(model, at) for model in models for at in range(len(model.layers))]
    names = {name: name if len(cells) <= WIDE else str(number) for number, name in enumerate(report.choices, 1)}
    legend = ", ".join(f"{short} {name}" for name, short in names.items() if short != name)
    page.text(
        "The choice at the last token of each prompt, which predicts the next, layer by layer: ✓ the path of the "
        f"prompt's domain, ✗ another path, unmarked what is neither.{f' ({legend})' if legend else ''}"
    )
    columns = ["prompt", "domain", *(model.layers[at].label.removeprefix("layer ") for model, at in cells)]
    rows = [
        [prompt.name, prompt.domain, *(_choice(model, model.prompts[number], at, names) for model, at in cells)]
        for number, prompt in enumerate(models[0].prompts)
    ]
    page.table(columns, rows, groups=[("", 2), *((model.name, len(model.layers)) for model in models)])


def _choice(model: ModelRoutes, prompt: PromptRoutes, at: int, names: Mapping[str, str]) -> Mark | None:
    chosen = prompt.chosen[at]
    if chosen is None:
        return None
    hint = f"{chosen}, {model.layers[at].name}"
    if prompt.path is None or chosen not in model.paths:
        return Mark(names[chosen], "neither", hint)
    return Mark(names[chosen], "right" if chosen == prompt.path else "wrong", hint)


def _information(page: Page, report: RoutingReport, svg: str) -> None:
    page.text(
        "Mutual information says how many bits the path taken gives about the domain of the text. It is 0 when paths "
        "and domains have nothing to do with each other, and all the bits of the domain (1 for two domains alike) when "
        "the path determines it. Estimated from few decisions it is too high; so the table also has its mean when the "
        "domains are permuted at random among the texts, and the p-value: how probable it is that such a permutation "
        "gives as much."
    )
    page.figure(svg)
    columns = ["", "entropy", "right", "by chance", "bits", "by chance", "p-value"]
    # The tally over all tokens of the prompts adds little to the one over the last tokens; the files have both.
    for at in dict.fromkeys((0, len(report.models[0].tallies) - 1)):
        rows = [row for model in report.models for row in _layer_rows(model, at, len(report.models) > 1)]
        page.table(columns, rows, f"{capital(report.models[0].tallies[at].what)}.")


def _layer_rows(model: ModelRoutes, at: int, several: bool) -> Iterator[list[str]]:
    for layer, one in zip(model.layers, model.tallies[at].layers, strict=True):
        if one is not None:
            known = one.information is not None
            yield [
                f"{model.name}, {layer.label}" if several else layer.label,
                f"{one.entropy:.2f}",
                percent(one.accuracy),
                percent(one.accuracy_by_chance),
                f"{one.information:.3f}" if known else "-",
                f"{one.information_by_chance:.3f}" if known else "-",
                percent(one.p_value),
            ]


def _typical(page: Page, report: RoutingReport) -> None:
    page.text(
        "The tokens that a choice is taken for most often, beyond what its load and their frequency would give. Of "
        "many choices the most used are here; `typical.csv` has all."
    )
    rows = []
    for model in report.models:
        for layer, one, typical in zip(model.layers, model.tallies[-1].layers, model.typical, strict=True):
            if one is None or typical is None or layer.of_paths:
                continue
            used = sorted(_active_choices(model, layer), key=lambda name: -one.load[name])
            label = f"{model.name}, {layer.label}" if len(report.models) > 1 else layer.label
            shown = used[: FEW if len(model.layers) <= MAX_ROWS else 1]
            rows += [[label, name, percent(one.load[name]), _codes(typical[name])] for name in shown]
    page.table(["", "choice", "load", "tokens"], rows)


def _codes(tokens: list[str]) -> str:
    return " ".join(f"`{shown}`" for token in tokens if (shown := repr(token)[1:-1].replace("`", "'")).strip())


def _token_views(page: Page, report: RoutingReport) -> None:
    page.text(
        "Each text once for every layer, its tokens in the colour of the path they took there."
        if not _top_k(report) and _has_paths(report)
        else "Each text once for every layer, its tokens in the colour of the choice with the largest weight there."
    )
    if report.most_choices > MANY:
        page.text("There are more choices than colours: hold the pointer over a token for the name of its choice.")
    if any(len(model.layers) > MAX_ROWS for model in report.models):
        page.text("Some of the layers are shown; `tokens.csv` has all.")
    for model in report.models:
        if len(report.models) > 1:
            page.heading(model.name, 3)
        for name, view in _views(model):
            page.tokens(_token_rows(model, view), report.choices, report.no_paths, name)


def _views(model: ModelRoutes) -> list[tuple[str, TokenView]]:
    """The beginnings of the data sets, else the longest prompts of each domain."""
    if model.data:
        return [(f"The first document of {data.name}.", data.sample) for data in model.data]
    chosen: list[PromptRoutes] = []
    for domain in dict.fromkeys(prompt.domain for prompt in model.prompts):
        of_domain = [prompt for prompt in model.prompts if prompt.domain == domain]
        chosen += sorted(of_domain, key=lambda prompt: -len(prompt.view.tokens))[:VIEWS]
    return [(f"A prompt of {prompt.domain}." if prompt.domain else "", prompt.view) for prompt in chosen]


def _token_rows(model: ModelRoutes, view: TokenView) -> list[tuple[str, list[tuple[str, str]]]]:
    """A row for each layer; of many, those of layers evenly spread from the first to the last."""
    rows = [
        (layer.label, list(zip(view.tokens, chosen, strict=True)))
        for layer, chosen in zip(model.layers, view.chosen, strict=True)
        if chosen is not None
    ]
    if len(rows) <= MAX_ROWS:
        return rows
    return [rows[round(at * (len(rows) - 1) / (FEW - 1))] for at in range(FEW)]


def _method(page: Page, report: RoutingReport) -> None:
    page.text(
        "Where there is a router, the routing that the model returns is read: the choice with the largest weight is a "
        "token's decision, also where it takes several. A decision is right when it is for the path of the text's "
        "domain; a combination of paths is never right. “By chance” is what choices with the same frequencies would "
        "get right without looking at the text. "
        "Entropy is that of the shares (with several choices for a token: of the load), in bits: 0 when one choice has "
        "everything."
    )
    for model in report.models:
        rows = [[layer.label, f"`{layer.name}`", ", ".join(layer.choices), _read_by(layer)] for layer in model.layers]
        page.table(["", "where", "choices", "read by"], rows, f"`{model.folder}`")
        for note in model.notes:
            page.text(f"{_with_code(note) if note.startswith('stages.') else capital(note)}.")


def _read_by(layer: Layer) -> str:
    return READ_BY[layer.read_by] + (f", top {layer.top_k}" if layer.top_k > 1 else "")


def _with_code(text: str) -> str:
    """The addresses of joins as code."""
    return re.sub(r"\bstages\.[\w.]*\w", r"`\g<0>`", text)
