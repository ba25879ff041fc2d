"""The facts of a decoder of transformers that `braid show` shows, under the names that those of Braid's models have."""

from typing import Any

import torch

from braidlm.core.models.accounting import Cost, training_bytes
from braidlm.decoders.adapter import read_adapter
from braidlm.decoders.cost import attention_heads, cost_rows, head_size
from braidlm.decoders.loading import OpenDecoder
from braidlm.model.config.ranges import Length
from braidlm.model.config.strict import decode


def decoder_facts(opened: OpenDecoder, length: int | None = None) -> dict[str, Any]:
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


def decoder_notes(opened: OpenDecoder) -> list[str]:
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
