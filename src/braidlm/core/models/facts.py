"""What can be said about a model without running it, as plain data for tables and for programs."""

from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton, stage_table, training_bytes
from braidlm.model.config.braid_config import BraidConfig


def model_facts(config: BraidConfig, length: int | None = None) -> dict[str, Any]:
    """Size, cost per token at sequences of `length` (by default the context), and memory."""
    if length is not None and length < 1:
        raise BraidError(f"length must be at least 1, got {length}")
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
