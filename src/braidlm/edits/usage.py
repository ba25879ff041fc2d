"""How much each module is used on a text: how often it is chosen, or how much it adds to the stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.edits.criteria import Criterion
from braidlm.edits.modules import Modules, layers_of, modules_of
from braidlm.inspection.texts import DataSource, windows_of
from braidlm.model.attention.routed import span_for_scope
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import TopKRouter
from braidlm.opening.braid import OpenedBraid

Usage = dict[str, Tensor]
"""By a routed part's address, a number for each of its modules."""


@dataclass(frozen=True)
class Calibration:
    """How much a model's modules are used on a text."""

    texts: list[Sequence[int]]
    """Its documents as token ids."""
    usage: Usage


def calibrate(source: OpenedBraid, text: str, tokens: int, criterion: Criterion) -> Calibration:
    """Measure the use of a model's modules on the first `tokens` of a text."""
    modules, texts = all_modules(source), calibration_texts(source, text, tokens)
    return Calibration(texts, measure_usage(source.load(dtype=torch.float32), modules, texts, criterion))


def all_modules(source: OpenedBraid) -> list[Modules]:
    """The modules of all blocks, or an error if there are none."""
    modules = [one for layer in layers_of(source.info) for one in modules_of(layer)]
    if not modules:
        in_paths = any(isinstance(module, TopKRouter) for module in source.info.model.modules())
        raise BraidError(
            "this model has no experts in its blocks: there is nothing to prune",
            source.title,
            "Experts of paths and projections cannot be pruned; `--without` switches them off." if in_paths else None,
        )
    return modules


def calibration_texts(source: OpenedBraid, text: str, tokens: int) -> list[Sequence[int]]:
    """The documents of a calibration text, as the model's tokens."""
    data = DataSource("text", text, tokens, called=text)
    return [document.ids for document in data.texts(source.tokenizer)]


@torch.no_grad()
def measure_usage(
    model: BraidForCausalLM,
    modules: Sequence[Modules],
    texts: Sequence[Sequence[int]],
    criterion: Criterion,
    batch: int = 8,
) -> Usage:
    """The sum over all tokens of how often a module was chosen, or of its weight times the norm of its output."""
    usage = {one.address: torch.zeros(len(one.names), dtype=torch.float64) for one in modules}
    recorded = _recorded(model, modules, usage, criterion)
    total, done = sum(map(len, texts)), 0
    with recorded as real, console.progress("use of modules", total, "tokens") as advance:
        for windows in windows_of(texts, model.config.max_position_embeddings, batch):
            ids, mask = windows.padded(model.device)
            real[:] = [mask]
            model.model(ids, attention_mask=mask, use_cache=False)
            done += windows.tokens
            advance(done, "")
    return usage


@contextmanager
def _recorded(
    model: nn.Module, modules: Sequence[Modules], usage: Usage, criterion: Criterion
) -> Iterator[list[Tensor]]:
    """Let each routed part add to the usage when it runs; the list holds the mask of real tokens."""
    real: list[Tensor] = []
    handles = []
    for one in modules:
        part: Any = model.get_submodule(one.address)

        def add(part: Any, inputs: tuple[Any, ...], output: Any, address: str = one.address) -> None:
            routing = output[1][0]
            if criterion == "frequency":
                used = torch.zeros_like(routing.probabilities_BTN).scatter(-1, routing.chosen_BTK, 1.0)
            else:
                if hasattr(part, "scope"):
                    inputs = (inputs[0], span_for_scope(routing, inputs[1], part.scope))
                used = routing.weights_BTN * part.expert_outputs(*inputs).float().norm(dim=-1).permute(1, 2, 0)
            usage[address] += (used * real[0][..., None]).sum((0, 1)).double().cpu()

        handles.append(part.register_forward_hook(add))
    try:
        yield real
    finally:
        for handle in handles:
            handle.remove()
