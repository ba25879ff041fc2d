"""Models with a parallel stage, its first layer, and the conversion of stacked weights to a module per path."""

import re
from typing import Any

import torch
from torch import Tensor

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.span import Span
from tests.tiny_models import random_ids, tiny_model


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


def experts(count: int, shared: int | None = None, feed: dict[str, Any] | None = None, **router: Any) -> dict[str, Any]:
    """Feed-forward experts without routing losses, which are computed in float32."""
    bank = {"names": count, "shared": shared, "router": {"losses": {}, **router}}
    return {"stacked": "with_experts", "feed": {"hidden": 12, **(feed or {}), "experts": bank}}


def attention_experts(keys: str = "own", **router: Any) -> dict[str, Any]:
    """Attention experts without routing losses."""
    return {"attention": {"heads": 2, "experts": {"names": 3, "keys": keys, "router": {"losses": {}, **router}}}}


def both_forms(options: dict[str, Any], count: int, **architecture: Any) -> tuple[BraidForCausalLM, BraidForCausalLM]:
    """A model whose paths are stacked, and one with the same weights and a module for each path."""
    own = {key: options[key] for key in ("width", "depth") if key in options}
    stage = {key: value for key, value in options.items() if key not in (*own, "stacked")}
    names = [f"path_{number + 1}" for number in range(count)]
    untied = {"tie_embeddings": False} if "to" in options else {}
    stacked, plain = (
        path_model(architecture=architecture | untied, **stage, paths=dict.fromkeys(names, own), stacked=on)
        for on in (options.get("stacked", True), False)
    )
    assert all(layer.stack is not None for layer in stacked.model.stages[0].layers)
    assert all(layer.paths is not None for layer in plain.model.stages[0].layers)
    plain.load_state_dict(unstacked(stacked.state_dict(), names))
    return stacked, plain


def unstacked(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Weights (or gradients) of stacked paths with the names and shapes of a model with a module per path."""
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        before, part, after = _split_key(key)
        if not part:
            result[key] = tensor
            continue
        own = re.fullmatch(rf"(\d+\.(?:feed\.router|attention))\.({'|'.join(names)})\.(.+)", after)
        if own is not None:  # each path has its own
            result[f"{before}.paths.{own[2]}.{own[1]}.{own[3]}"] = tensor
            continue
        if ".feed.bank." in key:  # a bank of all paths' experts
            banks = zip(names, tensor.chunk(len(names)), strict=True)
            result |= {f"{before}.paths.{name}.{after}": bank for name, bank in banks}
            continue
        for name, member in zip(names, tensor, strict=True):
            new_key = f"{before}.paths.{name}.{after}" if part == "stack" else f"{before}.enter.{name}.{after}"
            result[new_key] = member.T if member.ndim == 2 else member  # [in, out] in a stack, [out, in] in torch
    return result


def _split_key(key: str) -> tuple[str, str, str]:
    for part in ("stack", "enter"):
        before, separator, after = key.partition(f".{part}.")
        if separator:
            return before, part, after
    return key, "", ""
