"""Models with a parallel stage, one layer of it laid bare, and the two forms its weights can have."""

from typing import Any

import torch
from torch import Tensor

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.span import Span
from tiny_models import random_ids, tiny_model


def path_model(seed: int = 0, architecture: dict[str, Any] | None = None, **parallel: Any) -> BraidForCausalLM:
    """A model with one parallel stage, in float64."""
    stages = [{"parallel": {"paths": 2, **parallel}}]
    return tiny_model(torch.float64, seed, stages=stages, **(architecture or {}))


def first_layer(
    batch: int = 2, time: int = 6, seed: int = 0, **parallel: Any
) -> tuple[ParallelLayer, Tensor, Span, list[Tensor]]:
    """A layer, the stream that comes into it, the facts of the pass, and what each path makes of the stream."""
    model = path_model(seed, **parallel)
    layer = model.model.stages[0].layers[0]
    hidden = model.model.embedding(random_ids(batch, time)).detach()
    span = model.model.span(hidden)
    return layer, hidden, span, layer.outputs(hidden, span)[0]


def unstacked(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Weights (or gradients) of stacked paths as a model with a module per path calls and shapes them."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        before, part, after = _divided(key)
        if not part:
            found[key] = tensor
            continue
        for name, own in zip(names, tensor, strict=True):
            place = f"{before}.paths.{name}.{after}" if part == "stack" else f"{before}.enter.{name}.{after}"
            found[place] = own.T if own.ndim == 2 else own  # [in, out] in a stack, [out, in] in torch
    return found


def _divided(key: str) -> tuple[str, str, str]:
    for part in ("stack", "enter"):
        before, found, after = key.partition(f".{part}.")
        if found:
            return before, part, after
    return key, "", ""
