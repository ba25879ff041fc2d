"""`braid routes` as a function: which path the tokens of prompts and data sets take, for one model or several.

Models are opened and checked one after another, run over the texts, and described.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.console import progress, warn
from braidlm.core.decoding.generation import TextStream
from braidlm.core.decoding.prompts import DEFAULT_PROMPTS, Prompt, read_prompts
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.report.rendering import check_out, write
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.inspection.collect import NO_CHOICE, TokenChoices, collect_choices
from braidlm.inspection.gates import ModelGates, kind_of_gates, measure_gates
from braidlm.inspection.layers import Layer, NothingToSee, find_layers, no_choices, routing_modules
from braidlm.inspection.measures import counts_of, load_of, named_shares, tally, typical_tokens
from braidlm.inspection.results import (
    PASSED_BY,
    DataRoutes,
    ModelRoutes,
    PromptRoutes,
    RoutingReport,
    TokenView,
    degenerate,
)
from braidlm.inspection.routes_report import PAGE, routes_report
from braidlm.inspection.texts import Text, Texts, check_domains, data_sources, prompt_texts, right_paths
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import path_names
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
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
    opened: list[OpenedModel] = []
    left_out: list[tuple[OpenedModel, NothingToSee]] = []
    for model in found:
        where = str(model.folder)
        if is_gated(model) or is_routed(model):
            model.check()
            opened.append(model)
        elif isinstance(model, OpenedBraid):
            left_out.append((model, no_choices(where)))
        else:
            todo = "`braid edit gate MODEL --out DIR` adds some."
            left_out.append((model, NothingToSee("this decoder has no gates to look at", where, todo)))
    for model, problem in left_out:
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
    return isinstance(model, OpenedBraid) and bool(routing_modules(model.info.model))


def paths_of(model: OpenedModel) -> tuple[str, ...]:
    """The names of all paths of a model."""
    return path_names(model.info.model) if isinstance(model, OpenedBraid) else ()


def analyse(
    opened: OpenedModel, texts: Texts, right: dict[str, str | None], device: str, batch: int
) -> tuple[ModelRoutes | None, ModelGates | None]:
    """Run one model over its texts and describe what it chose, and what its gates did."""
    model: Any = opened.load(device)
    routes = _routes(opened, model, texts, right, batch) if is_routed(opened) else None
    return routes, _gates(opened, model, texts) if is_gated(opened) else None


def _routes(
    opened: OpenedModel, model: BraidForCausalLM, texts: Texts, right: dict[str, str | None], batch: int
) -> ModelRoutes:
    with errors_at(str(opened.folder)):
        layers = find_layers(model)
    with progress(f"routes of {opened.name}", texts.tokens, "tokens") as advance:
        choices = collect_choices(model, layers, texts.all, batch, advance)
    inactive = {name for layer in layers if layer.of_paths for name in layer.inactive}
    paths = list(paths_of(opened))
    active = [name for name in paths if name not in inactive]
    result = ModelRoutes(opened.name, str(opened.folder), paths, active, right, layers)
    _describe(result, texts, choices, opened.tokenizer)
    return result


def _gates(opened: OpenedModel, model: Any, texts: Texts) -> ModelGates:
    with progress(f"gates of {opened.name}", texts.tokens, "tokens") as advance:
        ids, domains = [text.ids for text in texts.all], [text.domain for text in texts.all]
        layers = measure_gates(model, ids, domains, advance)
    return ModelGates(opened.name, str(opened.folder), kind_of_gates(model), texts.tokens, layers)


def _describe(result: ModelRoutes, texts: Texts, choices: list[TokenChoices], tokenizer: BraidTokenizer) -> None:
    """Add everything the report says about a model."""
    layers, right = result.layers, result.domains
    of_prompts, of_data = choices[: len(texts.prompts)], choices[len(texts.prompts) :]
    for text, of_text in zip(texts.prompts, of_prompts, strict=True):
        result.prompts.append(_prompt_routes(result, text, of_text, tokenizer))
    documents: list[Text] = []
    for name, own in texts.data.items():
        part = of_data[len(documents) : len(documents) + len(own)]
        result.data.append(_data_routes(result, name, own, part, tokenizer))
        documents += own
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


def _prompt_routes(result: ModelRoutes, text: Text, choices: TokenChoices, tokenizer: BraidTokenizer) -> PromptRoutes:
    view = _view(tokenizer, text.ids, choices, result.layers)
    at_last = [None if names is None or names[-1] == PASSED_BY else names[-1] for names in view.chosen]
    path = result.domains.get(text.domain) if text.domain else None
    return PromptRoutes(text.name, text.domain, path, at_last, _shares(result.layers, [choices]), view)


def _data_routes(
    result: ModelRoutes, name: str, documents: list[Text], choices: list[TokenChoices], tokenizer: BraidTokenizer
) -> DataRoutes:
    size = sum(len(text.ids) for text in documents)
    sample = _view(tokenizer, documents[0].ids[:SHOWN], choices[0].part(slice(SHOWN)), result.layers)
    return DataRoutes(name, result.domains.get(name), len(documents), size, _shares(result.layers, choices), sample)


def _remark(result: ModelRoutes, choices: Sequence[TokenChoices], domains: list[str]) -> None:
    """Add what stands out, and what limits the reading."""
    for index, layer in enumerate(result.layers):
        if layer.read_by:
            load = named_shares(load_of(choices, index, len(layer.choices)), layer.choices)
            result.findings += degenerate(layer, load, result.paths, domains)
        else:
            result.notes.append(f"{layer.name}: {layer.note}")
    if any(layer.read_by == "cosine" for layer in result.layers):
        result.notes.append(
            "without a router, the path is named whose output is closest in cosine to the joined output"
        )
    if any(layer.read_by == "shares" for layer in result.layers):
        result.notes.append("in the head, the path is named that has the largest share of the probabilities")
    if inactive := [name for name in result.paths if name not in result.active]:
        result.notes.append(f"inactive: {', '.join(inactive)}")
    for layer in result.layers:
        if layer.inactive and not layer.of_paths:
            result.notes.append(f"{layer.name}: without {', '.join(layer.inactive)}")
    if domains and result.paths and not any(result.domains.values()):
        pairs = " ".join(f"{domain}={path}" for domain, path in zip(domains, result.paths, strict=False))
        result.notes.append(f"no domain is a path of this model, so none is right; `--domains {pairs}` would say so")


def _shares(layers: Sequence[Layer], choices: Sequence[TokenChoices]) -> list[dict[str, float] | None]:
    """For each layer, over all tokens of some texts."""
    return [
        named_shares(counts_of(np.concatenate([one.main_LT[n] for one in choices]), len(layer.choices)), layer.choices)
        if layer.read_by
        else None
        for n, layer in enumerate(layers)
    ]


def _view(tokenizer: BraidTokenizer, ids: Sequence[int], choices: TokenChoices, layers: Sequence[Layer]) -> TokenView:
    stream = TextStream(tokenizer, [])
    pieces = [stream.add(token) for token in ids]
    pieces[-1] += stream.finish()
    served = [_served(layer, choices, index) if layer.read_by else None for index, layer in enumerate(layers)]
    return TokenView(
        pieces, [None if row is None else [next(iter(by), PASSED_BY) for by in row] for row in served], served
    )


def _served(layer: Layer, choices: TokenChoices, index: int) -> list[dict[str, float]]:
    """For each token its choices in a layer with their weights, the largest first."""
    pairs = zip(choices.chosen_LKT[index].T, choices.weights_LKT[index].T, strict=True)
    return [
        {layer.choices[n]: float(weight) for n, weight in zip(chosen, weights, strict=True) if n != NO_CHOICE}
        for chosen, weights in pairs
    ]


TOKENS = 20_000
"""How many tokens of each data set are read, by default."""


def routes(
    models: Names,
    prompts: StrPath | Sequence[Prompt | str] | None = None,
    data: Mapping[str, StrPath] | None = None,
    *,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    domains: Mapping[str, str] | None = None,
    tokens: int = TOKENS,
    held_out: float | None = None,
    out: StrPath | None = None,
    back: str = "",
    device: str = "auto",
    batch: int = 16,
) -> RoutingReport:
    """Who goes where in models, each named by its folder, its run or its study (all that have paths, experts or gates).

    `prompts` is a file or a list, by default (without `data`) the 20 of PaPaformer; `data` names packed folders or
    text; `paths` are those to use, `without` modules that are switched off; `domains` says which path should know a
    domain of another name; `out` is a folder for tables, pictures and a page, which links `back` to a page that it
    belongs to.
    """
    path_of = dict(domains or {})
    opened = open_readable(models, paths, without)
    if out is not None:
        check_out(out, "braid routes", f"{PAGE}.html", fresh=True)
    loaded = _prompts(prompts, with_data=bool(data))
    sources = data_sources(data, tokens, held_out)
    if not loaded and not sources:
        raise BraidError("there is nothing to look at", todo="Give prompts or data.")
    named = [*(prompt.domain for prompt in loaded if prompt.domain), *(source.name for source in sources)]
    check_domains(path_of, named, [path for model in opened for path in paths_of(model)])
    right = [right_paths(named, paths_of(model), path_of, str(model.folder)) for model in opened]
    device = choose_device(device)
    # Every text is read and checked before any model runs; models of one tokenizer share the tokens.
    texts: dict[tuple[str, int | None], Texts] = {}
    keys = [(model.tokenizer.fingerprint, model.context) for model in opened]
    for key, model in zip(keys, opened, strict=True):
        if key not in texts:
            of_prompts = prompt_texts(loaded, model.tokenizer, model.context, str(model.folder))
            texts[key] = Texts(of_prompts, {source.name: source.texts(model.tokenizer) for source in sources})
    report = RoutingReport([])
    for key, model, of_domains in zip(keys, opened, right, strict=True):
        chosen, gates = analyse(model, texts[key], of_domains, device, batch)
        report.models += [] if chosen is None else [chosen]
        report.gated += [] if gates is None else [gates]
    if out is not None:
        write(routes_report(report, back), out, PAGE, fresh=True)
    return report


def _prompts(prompts: StrPath | Sequence[Prompt | str] | None, with_data: bool) -> list[Prompt]:
    if prompts is None:
        return [] if with_data else read_prompts(DEFAULT_PROMPTS)
    if isinstance(prompts, (str, Path)):
        return read_prompts(prompts)
    return [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
