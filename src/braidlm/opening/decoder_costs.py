"""The costs of a decoder of transformers, counted from its parameters, and the facts that `braid show` shows of it."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from braidlm.core.models.accounting import Cost, training_bytes
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode
from braidlm.opening.adapter import read_adapter
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.structure import find_parts


def decoder_cost(model: PreTrainedModel, length: int) -> Cost:
    """The whole decoder's cost at sequences of `length`."""
    return sum((cost for _, cost in cost_rows(model, length)), Cost())


def cost_rows(model: PreTrainedModel, length: int) -> list[tuple[str, Cost]]:
    """The costs of embedding, layers, their gates, what else there is, and head."""
    parts, share = find_parts(model), _active_experts(model)
    rows = {name: Cost() for name in ("embedding", "layers", "gates", "others", "head")}
    head = set(parts.head.parameters())
    for name, parameter in model.named_parameters():
        owner = _owner(name, parameter, parts)
        active = share if ".experts." in name else 1.0
        row = rows[owner]
        row.parameters += parameter.numel()
        row.active_parameters += round(active * parameter.numel())
        if parameter.ndim > 1 and owner not in ("embedding", "others"):
            row.flops_per_token += round(2 * active * parameter.numel())
    config = model.config.get_text_config()
    # Scores and sums of values: two products of each token with the half of the sequence that it sees on average.
    scores = 2 * (length + 1) * attention_heads(config) * head_size(config)
    rows["layers"].flops_per_token += scores * config.num_hidden_layers
    if tied := sum(p.numel() for p in head & set(parts.embedding.parameters())):
        rows["head"].flops_per_token += 2 * tied  # it is counted once, and still multiplied
    return [(name, cost) for name, cost in rows.items() if cost != Cost()]


def attention_heads(config: Any) -> int:
    """How many heads a layer attends with: none in a state-space model."""
    return getattr(config, "num_attention_heads", None) or 0


def head_size(config: Any) -> int:
    """Channels of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // max(1, attention_heads(config))


def _owner(name: str, parameter: nn.Parameter, parts: Any) -> str:
    if any(parameter is own for own in parts.embedding.parameters()):
        return "embedding"
    if any(parameter is own for own in parts.head.parameters()):
        return "head"
    if name.startswith(f"{parts.layers_name}."):
        return "gates" if name.split(".")[parts.layers_name.count(".") + 2] == "gate" else "layers"
    return "others"


def _active_experts(model: PreTrainedModel) -> float:
    """The share of the experts that a token uses; 1 where there are none."""
    config = model.config.get_text_config()
    used = getattr(config, "num_experts_per_tok", None)
    counts = [getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    there = next((count for count in counts if count), None)
    return used / there if used and there else 1.0


def decoder_facts(opened: OpenedDecoder, length: int | None = None) -> dict[str, Any]:
    """Size, cost per token at sequences of `length` (by default the context), and memory."""
    decode(Length | None, length, "length")
    model = opened.skeleton(torch.float32)
    config = opened.config.get_text_config()
    length = length or opened.context or 1
    costs = cost_rows(model, length)
    cost = sum((row for _, row in costs), Cost())
    depth, heads = config.num_hidden_layers, attention_heads(config)
    cached = 2 * depth * (getattr(config, "num_key_value_heads", None) or heads) * head_size(config)
    rows = [{"name": name, "layers": depth if name == "layers" else None, **vars(row)} for name, row in costs]
    return {
        **vars(cost),
        "length": length,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "context": opened.context or 0,
        "layers": depth,
        "stages": rows,
        "ends": None,
        "compression": [],
        "trainable": True,
        "memory": {
            "weights_float32": 4 * cost.parameters,
            "weights_bfloat16": 2 * cost.parameters,
            "training_adamw": training_bytes(cost.parameters),
            "cache_float32": 4 * cached * length,
        },
        "kernels": {"summary": "plain, as transformers computes it", "refusals": {}},
    }


def decoder_notes(opened: OpenedDecoder) -> list[str]:
    """What a decoder is, and what its adapters are for."""
    notes = []
    if opened.has_gates:
        gates = read_adapter(opened.folder).gates
        layers = ", ".join(map(str, gates.layers or ()))
        notes.append(f"Gates ({gates.kind.kind}) on layers {layers}.")  # type: ignore[attr-defined]
    if opened.has_lora:
        notes.append("LoRA adapters, counted as merged into its matrices.")
    if opened.base is not None:
        return [*notes, f"The base is {opened.base.address}.", *decoder_notes(opened.base)]
    return [f"This is a decoder of transformers ('{opened.config.model_type}'), used as it is."]
