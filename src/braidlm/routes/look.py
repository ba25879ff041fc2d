"""One model looked at: run it over the texts, and describe what it did."""

from collections.abc import Sequence

import numpy as np

from braidlm.core.console import progress
from braidlm.core.errors import BraidError
from braidlm.core.folders import load_model
from braidlm.core.generation import TextStream
from braidlm.data.braid_tokenizer import BraidTokenizer
from braidlm.model.switches import use_paths
from braidlm.routes.collect import Layer, collect_choices, find_layers, joins_of
from braidlm.routes.opening import OpenedModel
from braidlm.routes.report import DataRoutes, ModelRoutes, PromptRoutes, TokenView, degenerate
from braidlm.routes.tallies import counts_of, named_shares, tally
from braidlm.routes.texts import Text, Texts

SHOWN = 120
"""Tokens of a data set that are shown one by one."""


def look(opened: OpenedModel, texts: Texts, right: dict[str, str | None], device: str, batch: int) -> ModelRoutes:
    """Run one model over its texts."""
    model = load_model(opened.folder, device)
    if opened.heard is not None:
        use_paths(model, opened.heard)
    try:
        layers = find_layers(model)
    except BraidError as error:
        raise BraidError(error.what, opened.where) from error
    total = sum(len(text.ids) for text in texts.all)
    with progress(f"routes of {opened.name}", total, "tokens") as advance:
        chosen = collect_choices(model, layers, texts.all, batch, advance)
    silent = set().union(*(join.silent for join in joins_of(model)))
    heard = [name for name in opened.paths if name not in silent]
    found = ModelRoutes(opened.name, opened.where, list(opened.paths), heard, right, layers)
    _describe(found, texts, chosen, opened.tokenizer)
    return found


def _describe(found: ModelRoutes, texts: Texts, chosen: list[np.ndarray], tokenizer: BraidTokenizer) -> None:
    """Everything the report says about a model."""
    layers, right = found.layers, found.domains
    of_prompts, of_data = chosen[: len(texts.prompts)], chosen[len(texts.prompts) :]
    for text, choices in zip(texts.prompts, of_prompts, strict=True):
        found.prompts.append(_prompt_routes(found, text, choices, tokenizer))
    documents: list[Text] = []
    for name, theirs in texts.data.items():
        part = of_data[len(documents) : len(documents) + len(theirs)]
        found.data.append(_data_routes(found, name, theirs, part, tokenizer))
        documents += theirs
    if texts.prompts:
        last = [choices[:, -1:] for choices in of_prompts]
        found.tallies.append(tally("the last token of each prompt", layers, texts.prompts, last, right))
        found.tallies.append(tally("all tokens of the prompts", layers, texts.prompts, of_prompts, right))
    if documents:
        found.tallies.append(tally("all tokens of the data", layers, documents, of_data, right))
    _remark(found, _shares(layers, chosen), list(dict.fromkeys(text.domain for text in texts.all if text.domain)))


def _prompt_routes(found: ModelRoutes, text: Text, choices: np.ndarray, tokenizer: BraidTokenizer) -> PromptRoutes:
    view = _view(tokenizer, text.ids, choices, found.layers)
    at_last = [None if names is None else names[-1] for names in view.chosen]
    path = found.domains.get(text.domain) if text.domain else None
    return PromptRoutes(text.name, text.domain, path, at_last, _shares(found.layers, [choices]), view)


def _data_routes(
    found: ModelRoutes, name: str, documents: list[Text], chosen: list[np.ndarray], tokenizer: BraidTokenizer
) -> DataRoutes:
    size = sum(len(text.ids) for text in documents)
    sample = _view(tokenizer, documents[0].ids[:SHOWN], chosen[0][:, :SHOWN], found.layers)
    return DataRoutes(name, found.domains.get(name), len(documents), size, _shares(found.layers, chosen), sample)


def _remark(found: ModelRoutes, shares: list[dict[str, float] | None], domains: list[str]) -> None:
    """What stands out, and what limits the reading."""
    for layer, parts in zip(found.layers, shares, strict=True):
        if parts is None:
            found.notes.append(f"{layer.name}: {layer.note}")
        else:
            found.findings += degenerate(layer, parts, found.heard, domains)
    if any(layer.how == "cosine" for layer in found.layers):
        found.notes.append("without a router, the path is named whose output is closest in cosine to the joined output")
    if silent := [name for name in found.paths if name not in found.heard]:
        found.notes.append(f"silent: {', '.join(silent)}")
    if domains and not any(found.domains.values()):
        pairs = " ".join(f"{domain}={path}" for domain, path in zip(domains, found.paths, strict=False))
        found.notes.append(f"no domain is a path of this model, so none is right; `--domains {pairs}` would say so")


def _shares(layers: Sequence[Layer], chosen: Sequence[np.ndarray]) -> list[dict[str, float] | None]:
    """For each layer, over all tokens of some texts."""
    return [
        named_shares(counts_of(np.concatenate([c[n] for c in chosen]), len(layer.choices)), layer.choices)
        if layer.how
        else None
        for n, layer in enumerate(layers)
    ]


def _view(tokenizer: BraidTokenizer, ids: Sequence[int], choices: np.ndarray, layers: Sequence[Layer]) -> TokenView:
    stream = TextStream(tokenizer, [])
    pieces = [stream.add(token) for token in ids]
    pieces[-1] += stream.finish()
    chosen = [
        [layer.choices[n] for n in row] if layer.how else None for layer, row in zip(layers, choices, strict=True)
    ]
    return TokenView(pieces, chosen)
