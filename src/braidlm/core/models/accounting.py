"""What a model costs: parameters, active parameters, FLOPs, memory; counted from the modules themselves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from braidlm.core.errors import BraidError
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.parallel import ParallelStage
from braidlm.model.routing.stacked import StackedLinear


@dataclass
class Cost:
    """Parameters, those that take part in computing one token, and forward FLOPs per token."""

    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def skeleton(config: BraidConfig) -> BraidForCausalLM:
    """The model without memory for its weights: enough to count them."""
    with torch.device("meta"):
        return BraidForCausalLM(config)


def cost_of(module: nn.Module, length: int) -> Cost:
    """The cost of a module at sequences of `length`; a part that is not all used for a token has its own `cost`."""
    own_cost = getattr(module, "cost", None)
    if own_cost is not None:
        return own_cost(length)
    if isinstance(adapted := getattr(module, "base_layer", None), nn.Module):
        return cost_of(adapted, length)  # peft's layer around it adds little
    own = sum(p.numel() for p in module.parameters(recurse=False))
    products = module.weight.numel() if isinstance(module, (nn.Linear, StackedLinear)) else 0
    total = Cost(
        own,
        round(own * getattr(module, "active_share", 1.0)),
        round(2 * products * getattr(module, "product_share", 1.0)),
    )
    score_flops = getattr(module, "score_flops", None)
    if score_flops is not None:
        total.flops_per_token += score_flops(length)
    for child in module.children():
        total += cost_of(child, length)
    return total


def model_cost(model: BraidForCausalLM, length: int | None = None) -> Cost:
    """The whole model's cost, a shared matrix counted once (its product still costs FLOPs)."""
    total = cost_of(model, length or model.config.max_position_embeddings)
    shared = _shared_parameters(model)
    total.parameters -= shared
    total.active_parameters -= shared
    return total


def _shared_parameters(model: BraidForCausalLM) -> int:
    """How many parameters of the head are the embedding's, which counts them."""
    return sum(model.get_parameter(name).numel() for name in model.tied)


def stage_table(model: BraidForCausalLM, length: int | None = None) -> list[dict[str, Any]]:
    """One row for embedding, positions, each stage, norm and head."""
    length = length or model.config.max_position_embeddings
    body = model.model
    named: list[tuple[str, nn.Module]] = [("embedding", body.embedding), ("positions", body.positions)]
    choices = model.config.decoded.stages
    named += [(f"{i}: {c.kind}", s) for i, (c, s) in enumerate(zip(choices, body.stages, strict=True))]
    named += [("norm", body.norm), ("head", model.head)]
    rows = []
    for name, module in named:
        cost = cost_of(module, length)
        if module is model.head:
            cost.parameters -= _shared_parameters(model)
            cost.active_parameters -= _shared_parameters(model)
        row: dict[str, Any] = {"name": name, "layers": len(getattr(module, "layers", [])) or None}
        if isinstance(module, ParallelStage):
            row |= {"paths": list(module.names), "join": module.join_kind}
        rows.append(row | vars(cost))
    return rows


def training_bytes(parameters: int) -> int:
    """Weights, gradients and AdamW's two moments in float32; activations come on top."""
    return 16 * parameters


def model_facts(config: BraidConfig, length: int | None = None) -> dict[str, Any]:
    """Size, cost per token at sequences of `length` (by default the context), and memory."""
    decode(Length | None, length, "length")
    model = skeleton(config)
    limit = model.model.positions.limit
    if length is not None and limit is not None and length > limit:
        raise BraidError(f"length {length} is more than the model's {limit} learned positions")
    length = length or config.max_position_embeddings
    cost = model_cost(model, length)
    cached = sum(2 * heads * size for heads, size in (attention.cache_shape for attention in model.model.attentions))
    return {
        **vars(cost),
        "length": length,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "context": config.max_position_embeddings,
        "layers": config.num_hidden_layers,
        "stages": stage_table(model, length),
        "memory": {
            "weights_float32": 4 * cost.parameters,
            "weights_bfloat16": 2 * cost.parameters,
            "training_adamw": training_bytes(cost.parameters),
            "cache_float32": 4 * cached * length,
        },
    }
