"""One model looked at: run it over the texts, and describe what it did."""

from collections.abc import Sequence

import numpy as np

from braidlm.core.console import progress
from braidlm.core.decoding.generation import TextStream
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.paths.switches import use_paths
from braidlm.routes.collect import UNREAD, Layer, Taken, collect_choices, find_layers
from braidlm.routes.opening import OpenedModel
from braidlm.routes.places import silent_paths
from braidlm.routes.report import DataRoutes, ModelRoutes, PromptRoutes, TokenView, degenerate
from braidlm.routes.tallies import counts_of, load_of, named_shares, tally
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
        taken = collect_choices(model, layers, texts.all, batch, advance)
    silent = silent_paths(model)
    heard = [name for name in opened.paths if name not in silent]
    found = ModelRoutes(opened.name, opened.where, list(opened.paths), heard, right, layers)
    _describe(found, texts, taken, opened.tokenizer)
    return found


def _describe(found: ModelRoutes, texts: Texts, taken: list[Taken], tokenizer: BraidTokenizer) -> None:
    """Everything the report says about a model."""
    layers, right = found.layers, found.domains
    of_prompts, of_data = taken[: len(texts.prompts)], taken[len(texts.prompts) :]
    for text, took in zip(texts.prompts, of_prompts, strict=True):
        found.prompts.append(_prompt_routes(found, text, took, tokenizer))
    documents: list[Text] = []
    for name, theirs in texts.data.items():
        part = of_data[len(documents) : len(documents) + len(theirs)]
        found.data.append(_data_routes(found, name, theirs, part, tokenizer))
        documents += theirs
    if texts.prompts:
        last = [took.part(slice(-1, None)) for took in of_prompts]
        found.tallies.append(tally("the last token of each prompt", layers, texts.prompts, last, right))
        found.tallies.append(tally("all tokens of the prompts", layers, texts.prompts, of_prompts, right))
    if documents:
        found.tallies.append(tally("all tokens of the data", layers, documents, of_data, right))
    _remark(found, taken, list(dict.fromkeys(text.domain for text in texts.all if text.domain)))


def _prompt_routes(found: ModelRoutes, text: Text, took: Taken, tokenizer: BraidTokenizer) -> PromptRoutes:
    view = _view(tokenizer, text.ids, took, found.layers)
    at_last = [None if names is None else names[-1] for names in view.chosen]
    path = found.domains.get(text.domain) if text.domain else None
    return PromptRoutes(text.name, text.domain, path, at_last, _shares(found.layers, [took]), view)


def _data_routes(
    found: ModelRoutes, name: str, documents: list[Text], taken: list[Taken], tokenizer: BraidTokenizer
) -> DataRoutes:
    size = sum(len(text.ids) for text in documents)
    sample = _view(tokenizer, documents[0].ids[:SHOWN], taken[0].part(slice(SHOWN)), found.layers)
    return DataRoutes(name, found.domains.get(name), len(documents), size, _shares(found.layers, taken), sample)


def _remark(found: ModelRoutes, taken: Sequence[Taken], domains: list[str]) -> None:
    """What stands out, and what limits the reading."""
    for index, layer in enumerate(found.layers):
        if layer.how:
            load = named_shares(load_of(taken, index, len(layer.choices)), layer.choices)
            found.findings += degenerate(layer, load, found.heard, domains)
        else:
            found.notes.append(f"{layer.name}: {layer.note}")
    if any(layer.how == "cosine" for layer in found.layers):
        found.notes.append("without a router, the path is named whose output is closest in cosine to the joined output")
    if silent := [name for name in found.paths if name not in found.heard]:
        found.notes.append(f"silent: {', '.join(silent)}")
    if domains and found.paths and not any(found.domains.values()):
        pairs = " ".join(f"{domain}={path}" for domain, path in zip(domains, found.paths, strict=False))
        found.notes.append(f"no domain is a path of this model, so none is right; `--domains {pairs}` would say so")


def _shares(layers: Sequence[Layer], taken: Sequence[Taken]) -> list[dict[str, float] | None]:
    """For each layer, over all tokens of some texts."""
    return [
        named_shares(counts_of(np.concatenate([t.main_LT[n] for t in taken]), len(layer.choices)), layer.choices)
        if layer.how
        else None
        for n, layer in enumerate(layers)
    ]


def _view(tokenizer: BraidTokenizer, ids: Sequence[int], took: Taken, layers: Sequence[Layer]) -> TokenView:
    stream = TextStream(tokenizer, [])
    pieces = [stream.add(token) for token in ids]
    pieces[-1] += stream.finish()
    served = [_served(layer, took, index) if layer.how else None for index, layer in enumerate(layers)]
    return TokenView(pieces, [None if row is None else [next(iter(by)) for by in row] for row in served], served)


def _served(layer: Layer, took: Taken, index: int) -> list[dict[str, float]]:
    """For each token what serves it in a layer, with weights, the one that counts most first."""
    pairs = zip(took.picks_LKT[index].T, took.weights_LKT[index].T, strict=True)
    return [
        {layer.choices[n]: float(weight) for n, weight in zip(picks, weights, strict=True) if n != UNREAD}
        for picks, weights in pairs
    ]
