"""Who goes where, as a report: routes.html with its charts, and the short one of the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from braidlm.core.report.report import Bars, Mark, Report, Table, Tokens, listed
from braidlm.inspection.data_tables import data_tables
from braidlm.inspection.gates import ModelGates
from braidlm.inspection.layers import Layer
from braidlm.inspection.results import (
    ModelRoutes,
    PromptRoutes,
    RoutingReport,
    add_gates,
    capital,
    gate_table,
    information_chart,
    load_chart,
    percent,
    share_chart,
    share_table,
    verdicts,
)

PAGE = "routes"
"""The name of the page's file, without its suffix."""
MANY = 10
"""With more choices than this in a layer, loads are drawn as heat maps and not as bars, and colours repeat."""
MAX_NAMES = 50
"""With names of choices that together are longer, the terminal shows only the most and the least used of a layer."""
VIEWS = 2
"""Prompts of each domain that are shown token by token where there is no data to show."""
WIDE = 4
"""With more columns of choices than this they are numbered, as in the paper, and not named."""
MAX_ROWS = 16
"""Layers of a text that are shown token by token; of more, FEW are."""
FEW = 6
"""Of many choices or layers, so many are shown."""
READ_BY = {"router": "its router", "cosine": "cosine", "shares": "the largest share", "": "cannot be read"}


def routes_report(result: RoutingReport, back: str = "") -> Report:
    """The whole report, from the main results to the method; `back` is the page that it belongs to."""
    if result.models:
        names = listed([model.name for model in result.models])
        report = Report("Who goes where", f"Which path the tokens of a text take in {names}")
    else:
        report = Report("What gates do", f"The gated layers of {listed([model.name for model in result.gated])}")
        report.verdict = "\n\n".join(map(_gates_verdict, result.gated))
    report.tables = data_tables(result)
    if back:
        report.links({"Back to the report": back})
    if result.models:
        _add_routes(report, result)
    if result.gated:
        if result.models:
            report.heading("Gates")
        add_gates(report, result.gated)
    if result.models:
        _method(report.heading("How this was read"), result)
    return report


def _gates_verdict(model: ModelGates) -> str:
    """How much the gates of a model add, and what stands out."""
    least, most = (pick(model.layers, key=lambda one: one.relative) for pick in (min, max))
    shares = " to ".join(dict.fromkeys(f"{one.relative:.1%}" for one in (least, most)))
    added = f"the gates of {model.name} add {shares} of what their layers give, most in layer {most.layer}"
    return " ".join(f"{capital(one)}." for one in ([added] if most.relative else []) + model.findings)


def _add_routes(report: Report, result: RoutingReport) -> None:
    paragraphs = []
    for model in result.models:
        least = _least_load(model)
        load = "" if least is None else f"The least used choice of any layer has {percent(least)} of an even share. "
        said = verdicts(model)[::-1] or [f"{load}The texts have no domains to judge choices by."]
        said += [" ".join(f"{capital(finding)}." for finding in model.findings)] if model.findings else []
        paragraphs += [f"{model.name}: {text}" if len(result.models) > 1 else text for text in said]
    report.verdict = "\n\n".join(map(capital, paragraphs))
    _opening(report, result)
    what = result.models[0].tallies[-1].what
    report.heading("Layer by layer")
    caption = "The weight that routers give to each choice" if _top_k(result) else "How often each path is taken"
    if many := result.most_choices > MANY:
        caption = "How often each choice is taken: a row for each layer, a column for each choice"
    report.chart(load_chart(result) if many else share_chart(result), f"{caption}: {what}.", name="shares")
    if _top_k(result):
        _loads(report, result)
    if any(model.prompts for model in result.models):
        _grid(report.heading("Prompt by prompt"), result)
    if (bits := information_chart(result)) is not None:
        choice = "path" if _has_paths(result) else "choice"
        _information(report.heading(f"Does the {choice} tell what the text is about?"), result, bits)
    if not _has_paths(result):
        _typical(report.heading("What each takes"), result)
    _token_views(report.heading("Token by token"), result)


def _top_k(result: RoutingReport) -> bool:
    """Whether a token takes several choices in any layer."""
    return any(layer.top_k > 1 for model in result.models for layer in model.layers)


def _has_paths(result: RoutingReport) -> bool:
    return all(layer.of_paths for model in result.models for layer in model.layers)


def _opening(report: Report, result: RoutingReport) -> None:
    first = result.models[0]
    looked_at = [f"{len(first.prompts)} prompts"] if first.prompts else []
    looked_at += [f"{data.tokens:,} tokens of {data.name}" for data in first.data]
    what = "In each parallel layer a token takes one of several paths."
    if all(layer.read_by == "shares" for model in result.models for layer in model.layers):
        what = (
            "Whole models stand side by side, and for every token the head weighs them anew; the largest share counts."
        )
    elif _top_k(result) or not _has_paths(result):
        what = "Routers choose for each token a few of several paths or experts."
    about = "whether that has anything to do with what a text is about"
    report.text(f"{what} Here is which, for {', '.join(looked_at)}, and {about}. {result.note}".rstrip())
    if len(result.models) == 1:
        report.facts(dict(_key_figures(first)))
    elif (table := share_table(result, 0)).rows:
        # The foot of PaPaformer's Table 6: a column for each model.
        report.table(table)


def _key_figures(model: ModelRoutes) -> Iterator[tuple[str, Any]]:
    """The numbers of the tally with most tokens; the shares of paths are in the chart below."""
    tally = model.tallies[-1]
    yield "decisions", tally.decisions
    if tally.accuracy is not None:
        yield "for the domain's path", percent(tally.accuracy)
        yield "would be by chance", percent(tally.accuracy_by_chance)
    if (least := _least_load(model)) is not None:
        yield "of an even share, least used", percent(least)
    for name, share in tally.shares.items():
        if name not in model.paths:
            yield f"for all paths {name}", percent(share)
    if (best := tally.most_informative) is not None:
        yield f"of {best.domain_entropy:.2f} bits of the domain", f"{best.information:.2f}"


def _least_load(model: ModelRoutes) -> float | None:
    """The load of the least used choice of any layer in which tokens take several, as a share of an even load."""
    several = [(one.load, _active_choices(model, layer)) for layer, one in model.read() if layer.top_k > 1]
    return min((min(load[name] for name in names) * len(names) for load, names in several if names), default=None)


def _active_choices(model: ModelRoutes, layer: Layer) -> list[str]:
    """The choices of a layer that can be taken, without combinations of paths."""
    return [name for name in layer.active if not layer.of_paths or name in model.paths]


def _loads(report: Report, result: RoutingReport) -> None:
    report.text(
        "Where a token takes several choices, load is a choice's share of all picks, and weight its share of the "
        "router's weights. The picture shows weights."
    )
    columns = ["", "choices", "even load", "most used", "load", "weight", "least used", "load", "weight"]
    rows = []
    for model in result.models:
        for layer, one in model.read():
            if layer.top_k > 1:
                names = sorted(_active_choices(model, layer), key=lambda name: -one.load[name])
                ends = ((name, percent(one.load[name]), percent(one.weight[name])) for name in (names[0], names[-1]))
                chosen = [f"{layer.top_k} of {len(layer.choices)}", percent(1 / len(names))]
                rows.append([_label(result, model, layer), *chosen, *(cell for end in ends for cell in end)])
    caption = f"{capital(result.models[0].tallies[-1].what)}; `shares.csv` has every choice."
    report.table(Table(columns, rows, caption))


def _label(result: RoutingReport, model: ModelRoutes, layer: Layer) -> str:
    return f"{model.name}, {layer.label}" if len(result.models) > 1 else layer.label


def _grid(report: Report, result: RoutingReport) -> None:
    """PaPaformer's Table 6: a row for each prompt, a column for each layer of each model."""
    models = result.models
    cells = [(model, at) for model in models for at in range(len(model.layers))]
    names = {name: name if len(cells) <= WIDE else str(number) for number, name in enumerate(result.choices, 1)}
    legend = ", ".join(f"{short} {name}" for name, short in names.items() if short != name)
    report.text(
        "The choice at the last token of each prompt, which predicts the next, layer by layer: ✓ the path of the "
        f"prompt's domain, ✗ another path, unmarked what is neither.{f' ({legend})' if legend else ''}"
    )
    columns = ["prompt", "domain", *(model.layers[at].label.removeprefix("layer ") for model, at in cells)]
    rows = [
        [prompt.name, prompt.domain, *(_choice(model, model.prompts[number], at, names) for model, at in cells)]
        for number, prompt in enumerate(models[0].prompts)
    ]
    report.table(Table(columns, rows, groups=[("", 2), *((model.name, len(model.layers)) for model in models)]))


def _choice(model: ModelRoutes, prompt: PromptRoutes, at: int, names: Mapping[str, str]) -> Mark | None:
    if (chosen := prompt.chosen[at]) is None:
        return None
    hint = f"{chosen}, {model.layers[at].name}"
    if prompt.path is None or chosen not in model.paths:
        return Mark(names[chosen], "neither", hint)
    return Mark(names[chosen], "right" if chosen == prompt.path else "wrong", hint)


def _information(report: Report, result: RoutingReport, bits: Bars) -> None:
    report.text(
        "Mutual information says how many bits the path taken gives about the domain of the text. It is 0 when paths "
        "and domains have nothing to do with each other, and all the bits of the domain (1 for two domains alike) when "
        "the path determines it. Estimated from few decisions it is too high; so the table also has its mean when the "
        "domains are permuted at random among the texts, and the p-value: how probable it is that such a permutation "
        "gives as much."
    )
    report.chart(bits, name="information")
    columns = ["", "entropy", "right", "by chance", "bits", "by chance", "p-value"]
    # The tally over all tokens of the prompts adds little to the one over the last tokens; the files have both.
    for at in dict.fromkeys((0, len(result.models[0].tallies) - 1)):
        rows = []
        for model in result.models:
            for layer, one in model.read(at):
                right = [percent(share) for share in (one.accuracy, one.accuracy_by_chance)]
                known = (one.information, one.information_by_chance)
                shown = ["-" if number is None else f"{number:.3f}" for number in known]
                label = _label(result, model, layer)
                rows.append([label, f"{one.entropy:.2f}", *right, *shown, percent(one.p_value)])
        report.table(Table(columns, rows, f"{capital(result.models[0].tallies[at].what)}."))


def _typical(report: Report, result: RoutingReport) -> None:
    report.text(
        "The tokens that a choice is taken for most often, beyond what its load and their frequency would give. Of "
        "many choices the most used are here; `typical.csv` has all."
    )
    rows = []
    for model in result.models:
        for layer, one, typical in zip(model.layers, model.tallies[-1].layers, model.typical, strict=True):
            if one is None or typical is None or layer.of_paths:
                continue
            used = sorted(_active_choices(model, layer), key=lambda name: -one.load[name])
            label = _label(result, model, layer)
            for name in used[: FEW if len(model.layers) <= MAX_ROWS else 1]:
                tokens = (repr(token)[1:-1].replace("`", "'") for token in typical[name])
                codes = " ".join(f"`{token}`" for token in tokens if token.strip())
                rows.append([label, name, percent(one.load[name]), codes])
    report.table(Table(["", "choice", "load", "tokens"], rows))


def _token_views(report: Report, result: RoutingReport) -> None:
    one_path = not _top_k(result) and _has_paths(result)
    shown = "path they took there" if one_path else "choice with the largest weight there"
    report.text(f"Each text once for every layer, its tokens in the colour of the {shown}.")
    if result.most_choices > MANY:
        report.text("There are more choices than colours: hold the pointer over a token for the name of its choice.")
    if any(len(model.layers) > MAX_ROWS for model in result.models):
        report.text("Some of the layers are shown; `tokens.csv` has all.")
    for model in result.models:
        if len(result.models) > 1:
            report.heading(model.name, 3)
        # The beginnings of the data sets, else the longest prompts of each domain.
        views = [(f"The first document of {data.name}.", data.sample) for data in model.data]
        for domain in () if views else dict.fromkeys(prompt.domain for prompt in model.prompts):
            of_domain = [prompt.view for prompt in model.prompts if prompt.domain == domain]
            longest = sorted(of_domain, key=lambda view: -len(view.tokens))[:VIEWS]
            views += [(f"A prompt of {domain}." if domain else "", view) for view in longest]
        for name, view in views:
            chosen = zip(model.layers, view.chosen, strict=True)
            rows = [(layer.label, list(zip(view.tokens, row, strict=True))) for layer, row in chosen if row is not None]
            if len(rows) > MAX_ROWS:  # layers evenly spread from the first to the last
                rows = [rows[round(at * (len(rows) - 1) / (FEW - 1))] for at in range(FEW)]
            report.add(Tokens(rows, result.choices, result.no_paths, name))


def _method(report: Report, result: RoutingReport) -> None:
    report.text(
        "Where there is a router, the routing that the model returns is read: the choice with the largest weight is a "
        "token's decision, also where it takes several. A decision is right when it is for the path of the text's "
        "domain; a combination of paths is never right. “By chance” is what choices with the same frequencies would "
        "get right without looking at the text. "
        "Entropy is that of the shares (with several choices for a token: of the load), in bits: 0 when one choice has "
        "everything."
    )
    for model in result.models:
        rows = []
        for layer in model.layers:
            read_by = READ_BY[layer.read_by] + (f", top {layer.top_k}" if layer.top_k > 1 else "")
            rows.append([layer.label, f"`{layer.name}`", ", ".join(layer.choices), read_by])
        report.table(Table(["", "where", "choices", "read by"], rows, f"`{model.folder}`"))
        for note in model.notes:
            report.text(f"{capital(note)}.")


def short_report(result: RoutingReport) -> Report:
    """The report for the terminal: prompts by number, shares, every layer, and what gates do."""
    report = Report("Who goes where")
    if result.models and result.models[0].prompts:
        report.heading("The choice at the last token of each prompt, layer by layer, and how many are right")
        numbers = {name: str(number) for number, name in enumerate(result.choices, 1)}
        report.text(f"({', '.join(f'{number} {name}' for name, number in numbers.items())})")
        # PaPaformer's Table 6.
        rows = [
            [prompt.name[:40], prompt.domain or "-", *(_decisions(m.prompts[n], numbers) for m in result.models)]
            for n, prompt in enumerate(result.models[0].prompts)
        ]
        report.table(Table(["prompt", "domain", *(model.name for model in result.models)], rows))
    for at, tally in enumerate(result.models[0].tallies if result.models else ()):
        if (table := share_table(result, at)).rows:
            report.heading(f"{capital(tally.what)}, over all layers").table(Table(table.columns, table.rows))
    for model in result.models:
        _add_layers(report, model, RoutingReport([model]).choices)
        for line in (*model.findings, *verdicts(model), *(f"note: {note}" for note in model.notes)):
            report.text(line)
    for gates in result.gated:
        report.heading(f"{gates.name}: its gates ({gates.kind}) over {gates.tokens:,} tokens").text(
            "(the size and the mean of activations after each layer, with and without its gate; the gate's output as a "
            "share of the layer's, over all texts and by domain; by what factor the gate scales a random input)"
        )
        table = gate_table(gates)
        report.table(Table(table.columns, table.rows))
        for finding in gates.findings:
            report.text(finding)
    return report


def _decisions(prompt: PromptRoutes, numbers: Mapping[str, str]) -> str:
    """The choices at the last token, then in how many of the layers that can be read the right path was chosen."""
    chosen = " → ".join(numbers[choice] if choice else "·" for choice in prompt.chosen)
    if prompt.path is None:
        return chosen
    read = [choice for choice in prompt.chosen if choice is not None]
    return f"{chosen}  {read.count(prompt.path)}/{len(read)}"


def _add_layers(report: Report, model: ModelRoutes, choices: list[str]) -> None:
    """What each layer did: the load of every choice, or of the most and least used of many."""
    tally = model.tallies[-1]
    top_k = any(layer.top_k > 1 for layer in model.layers)
    many = sum(len(name) + 2 for name in choices) > MAX_NAMES
    rows = []
    for layer, one in zip(model.layers, tally.layers, strict=True):
        if one is None:
            rows.append([layer.label, *["-"] * (2 if many else len(choices)), "-", "-", "-"])
            continue
        ranked = sorted(one.load, key=lambda name: -one.load[name])
        loads = [percent(one.load.get(choice)) for choice in choices]
        if many:
            loads = [f"{name} {percent(one.load[name])}" for name in (ranked[0], ranked[-1])]
        information = "-" if one.information is None else f"{one.information:.2f} of {one.domain_entropy:.2f}"
        rows.append([layer.label, *loads, f"{one.entropy:.2f}", percent(one.accuracy), information])
    loads_of = "load of each choice; " if top_k else ""
    report.heading(f"{model.name}: {tally.what} ({loads_of}entropy in bits; bits that the path tells about the domain)")
    names = ("most used", "least used") if many else choices
    report.table(Table(["layer", *names, "entropy", "right", "bits"], rows))
