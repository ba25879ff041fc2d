"""Models with a parallel stage, its first layer, and the conversion of stacked weights to a module per path."""

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
    """A layer, its input, the span of the pass, and the output of each path."""
    model = path_model(seed, **parallel)
    layer = model.model.stages[0].layers[0]
    hidden = model.model.embedding(random_ids(batch, time)).detach()
    span = model.model.span(hidden)
    return layer, hidden, span, layer.outputs(hidden, span)[0]


def unstacked(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Weights (or gradients) of stacked paths with the names and shapes of a model with a module per path."""
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        before, part, after = _split_key(key)
        if not part:
            result[key] = tensor
            continue
        for name, own in zip(names, tensor, strict=True):
            new_key = f"{before}.paths.{name}.{after}" if part == "stack" else f"{before}.enter.{name}.{after}"
            result[new_key] = own.T if own.ndim == 2 else own  # [in, out] in a stack, [out, in] in torch
    return result


def _split_key(key: str) -> tuple[str, str, str]:
    for part in ("stack", "enter"):
        before, separator, after = key.partition(f".{part}.")
        if separator:
            return before, part, after
    return key, "", ""
