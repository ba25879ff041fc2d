"""`braid routes` as a function: which path the tokens of prompts and data sets take, for one model or several.

Models are opened and checked one after another, run over the texts, and described.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.console import progress, say, warn
from braidlm.core.decoding.generation import DEFAULT_PROMPTS, Prompt, read_prompts, token_texts
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.report.rendering import check_out, write
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.inspection.gates import ModelGates, measure_gates
from braidlm.inspection.layers import Layer, TokenChoices, collect_choices, find_layers, no_choices, routing_modules
from braidlm.inspection.measures import counts_of, named_shares, tally, typical_tokens
from braidlm.inspection.results import DataRoutes, ModelRoutes, PromptRoutes, RoutingReport, TokenView, degenerate
from braidlm.inspection.routes_report import PAGE, routes_report
from braidlm.inspection.texts import DataSource, Text, Texts, check_domains, prompt_texts, right_paths
from braidlm.model.config.ranges import Count, Probability
from braidlm.model.config.strict import decode
from braidlm.model.paths.switches import path_names
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import MEMBERS, gates_of
from braidlm.opening.names import Names, StrPath
from braidlm.opening.open import open_models
from braidlm.opening.opened_model import OpenedModel

SHOWN = 120
"""Tokens of a data set that are shown one by one."""


def open_readable(models: Names, paths: Sequence[str] | None, without: Sequence[str] | None) -> list[OpenedModel]:
    """Models by their names; `paths` are those to use, and `without` modules that are off, which each must have.

    Models without paths, experts or gates are refused where every model is named, and left out of a whole study.
    """
    found = open_models(models, paths=paths, without=without)
    all_named = len(found) == (1 if isinstance(models, (str, Path)) else len(models))
    opened = [model for model in found if is_gated(model) or is_routed(model)]
    for model in opened:
        model.check()
    for model in found:
        if model in opened:
            continue
        problem = no_choices(str(model.folder))
        if not isinstance(model, OpenedBraid):
            todo = "`braid edit gate MODEL --out DIR` adds some."
            problem = BraidError("this decoder has no gates to look at", str(model.folder), todo)
            if model.kind == MEMBERS:
                what = "the shares of these members are the same for every token, so there is nothing to look at"
                problem = BraidError(what, str(model.folder), "`braid compose ... --join posterior` weighs them anew.")
        if all_named or not opened:
            raise problem
        warn(f"{model.name} is left out: {problem.what}")
    return opened


def is_gated(model: OpenedModel) -> bool:
    """Whether a model has gates."""
    if isinstance(model, OpenedBraid):
        return model.config.decoded.gates is not None
    return isinstance(model, OpenedDecoder) and model.is_gated


def is_routed(model: OpenedModel) -> bool:
    """Whether a model has something to choose between."""
    if isinstance(model, OpenedBraid):
        return bool(routing_modules(model.info.model))
    return model.kind == MEMBERS and bool(model.config.judged)


def paths_of(model: OpenedModel) -> tuple[str, ...]:
    """The names of all paths of a model, or of its members."""
    if isinstance(model, OpenedBraid):
        return path_names(model.info.model)
    return tuple(model.config.names) if model.kind == MEMBERS else ()


def _routes(opened: OpenedModel, model: Any, texts: Texts, right: dict[str, str | None], batch: int) -> ModelRoutes:
    """Run one model over its texts and describe what it chose."""
    with errors_at(str(opened.folder)):
        layers = find_layers(model)
    with progress(f"routes of {opened.name}", texts.tokens, "tokens") as advance:
        choices = collect_choices(model, layers, texts.all, batch, advance)
    inactive = {name for layer in layers if layer.of_paths for name in layer.inactive}
    paths, tokenizer = list(paths_of(opened)), opened.tokenizer
    active = [name for name in paths if name not in inactive]
    result = ModelRoutes(opened.name, str(opened.folder), paths, active, right, layers)
    of_prompts, of_data = choices[: len(texts.prompts)], choices[len(texts.prompts) :]
    for text, own in zip(texts.prompts, of_prompts, strict=True):
        view = _view(tokenizer, text.ids, own, layers)
        at_last = [None if row is None else next(iter(row[-1]), None) for row in view.served]
        path = right.get(text.domain) if text.domain else None
        result.prompts.append(PromptRoutes(text.name, text.domain, path, at_last, _shares(layers, [own]), view))
    documents: list[Text] = []
    for name, added in texts.data.items():
        part = of_data[len(documents) : len(documents) + len(added)]
        sample = _view(tokenizer, added[0].ids[:SHOWN], part[0].part(slice(SHOWN)), layers)
        size = sum(len(text.ids) for text in added)
        result.data.append(DataRoutes(name, right.get(name), len(added), size, _shares(layers, part), sample))
        documents += added
    if texts.prompts:
        last = [one.part(slice(-1, None)) for one in of_prompts]
        result.tallies.append(tally("the last token of each prompt", layers, texts.prompts, last, right))
        result.tallies.append(tally("all tokens of the prompts", layers, texts.prompts, of_prompts, right))
    if documents:
        result.tallies.append(tally("all tokens of the data", layers, documents, of_data, right))
    for index, layer in enumerate(layers):
        typical = typical_tokens(texts.all, choices, index, len(layer.choices)) if layer.read_by else []
        shown = [[tokenizer.decode([token]) for token in tokens] for tokens in typical]
        result.typical.append(dict(zip(layer.choices, shown, strict=True)) if layer.read_by else None)
    _remark(result, choices, list(dict.fromkeys(text.domain for text in texts.all if text.domain)))
    return result


def _gates(opened: OpenedModel, model: Any, texts: Texts) -> ModelGates:
    """Run one model over its texts and describe what its gates did."""
    with progress(f"gates of {opened.name}", texts.tokens, "tokens") as advance:
        ids, domains = [text.ids for text in texts.all], [text.domain for text in texts.all]
        layers = measure_gates(model, ids, domains, advance)
    kind = next(iter(gates_of(model).values())).choice.kind
    return ModelGates(opened.name, str(opened.folder), kind, texts.tokens, layers)


def _remark(result: ModelRoutes, choices: Sequence[TokenChoices], domains: list[str]) -> None:
    """Add what stands out, and what limits the reading."""
    for index, layer in enumerate(result.layers):
        if layer.read_by:
            picks = np.concatenate([one.chosen_LKT[index] for one in choices], axis=-1)
            load = named_shares(counts_of(picks, len(layer.choices)), layer.choices)
            result.findings += degenerate(layer, load, result.paths, domains)
        else:
            result.notes.append(f"{layer.label}: {layer.note}")
    if any(layer.read_by == "cosine" for layer in result.layers):
        result.notes += ["without a router, the path is named whose output is closest in cosine to the joined output"]
    if any(layer.read_by == "shares" for layer in result.layers):
        result.notes.append("in the head, the path is named that has the largest share of the probabilities")
    if inactive := [name for name in result.paths if name not in result.active]:
        result.notes.append(f"inactive: {', '.join(inactive)}")
    for layer in result.layers:
        if layer.inactive and not layer.of_paths:
            result.notes.append(f"{layer.label}: without {', '.join(layer.inactive)}")
    if domains and result.paths and not any(result.domains.values()):
        pairs = " ".join(f"{domain}={path}" for domain, path in zip(domains, result.paths, strict=False))
        result.notes.append(f"no domain is a path of this model, so none is right; `--domains {pairs}` would say so")


def _shares(layers: Sequence[Layer], choices: Sequence[TokenChoices]) -> list[dict[str, float] | None]:
    """For each layer the share of each choice, over all tokens of some texts."""
    main_LT = np.concatenate([one.main_LT for one in choices], axis=-1)
    counts = [counts_of(row, len(layer.choices)) for row, layer in zip(main_LT, layers, strict=True)]
    return [named_shares(c, one.choices) if one.read_by else None for c, one in zip(counts, layers, strict=True)]


def _view(tokenizer: BraidTokenizer, ids: Sequence[int], choices: TokenChoices, layers: Sequence[Layer]) -> TokenView:
    served: list[list[dict[str, float]] | None] = []
    for at, layer in enumerate(layers):
        named = [{layer.choices[n]: weight for n, weight in by.items()} for by in choices.by_token(at)]
        served.append(named if layer.read_by else None)
    return TokenView.of(token_texts(tokenizer, ids), served)


TOKENS = 20_000
"""How many tokens of each data set are read, by default."""
NAME_DATA = "`--data NAME=TEXT` looks at text of your own, such as `stories=dev.txt`."
OTHERS_TEXT = "No text was named: these are PaPaformer's 20 prompts of stories and maths, whatever the model learned."


def routes(
    models: Names,
    prompts: StrPath | Sequence[Prompt | str] | None = None,
    data: Mapping[str, StrPath] | None = None,
    *,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    domains: Mapping[str, str] | None = None,
    tokens: int | None = None,
    held_out: float | None = None,
    out: StrPath | None = None,
    back: str = "",
    device: str = "auto",
    batch: int = 16,
) -> RoutingReport:
    """Who goes where in models, each named by its folder, its run or its study (all that have paths, experts or gates).

    `prompts` is a file or a list, by default (without `data`) the 20 of PaPaformer; `data` names packed folders or
    text, of each of which `tokens` are read (20,000); `paths` are those to use, `without` modules that are switched
    off; `domains` says which path should know a domain of another name; `out` is a folder for tables, pictures and a
    page, which links `back` to a page that it belongs to.
    """
    path_of = dict(domains or {})
    opened = open_readable(models, paths, without)
    if out is not None:
        check_out(out, "braid routes", f"{PAGE}.html", fresh=True)
    if not data and (tokens is not None or held_out is not None):
        which = "--held-out" if tokens is None else "--tokens"
        raise BraidError("this is how much of the data is read, and there is none", which, NAME_DATA)
    asked = prompts is not None or bool(data)
    if not asked:
        prompts = DEFAULT_PROMPTS
    read = read_prompts(prompts) if isinstance(prompts, (str, Path)) else prompts or ()
    loaded = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in read]
    tokens = decode(Count, TOKENS if tokens is None else tokens, "tokens")
    decode(Probability | None, held_out, "held_out")
    sources = [DataSource(name, str(path), tokens, held_out) for name, path in (data or {}).items()]
    for source in sources:
        source.check()
    if not loaded and not sources:
        raise BraidError("there is nothing to look at", todo="Give prompts or data.")
    named = list(dict.fromkeys(filter(None, [*(one.domain for one in loaded), *(source.name for source in sources)])))
    check_domains(path_of, named, list(dict.fromkeys(path for model in opened for path in paths_of(model))))
    right = []
    for model in opened:
        paths = paths_of(model)
        # Prompts that nobody asked for say nothing of paths that are not called as their domains.
        others = {} if asked else {name: "" for name in named if name not in paths}
        right.append(right_paths(named, paths, others | path_of, str(model.folder)))
    device = choose_device(device)
    if not asked:
        say(f"{OTHERS_TEXT} {NAME_DATA}")
    # Every text is read and checked before any model runs; models of one tokenizer share the tokens.
    texts: dict[tuple[str, int | None], Texts] = {}
    keys = [(model.tokenizer.fingerprint, model.context) for model in opened]
    for key, model in zip(keys, opened, strict=True):
        if key not in texts:
            of_prompts = prompt_texts(loaded, model.tokenizer, model.context, str(model.folder))
            texts[key] = Texts(of_prompts, {source.name: source.texts(model.tokenizer) for source in sources})
    report = RoutingReport([], note="" if asked else OTHERS_TEXT)
    for key, model, of_domains in zip(keys, opened, right, strict=True):
        loaded_model = model.load(device)
        if is_routed(model):
            report.models.append(_routes(model, loaded_model, texts[key], of_domains, batch))
        if is_gated(model):
            report.gated.append(_gates(model, loaded_model, texts[key]))
        del loaded_model  # frees its memory before the next one is loaded
    if out is not None:
        write(routes_report(report, back), out, PAGE, fresh=True)
    return report
