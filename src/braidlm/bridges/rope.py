"""Rotary positions in transformers' configurations (`rope_parameters`, once `rope_scaling`) and in ours."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from braidlm.model.attention.positions import rope_scalings

ROPE_SCALINGS = ("linear", "llama3", "yarn")
"""The kinds of scaling that have one name and meaning in both."""
NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Transformers' names of the options of a scaling, and ours."""


def braid_positions(config: Any) -> dict[str, Any]:
    """Our positions for a foreign configuration without problems."""
    rope = dict(config.rope_parameters or {})
    positions = {"kind": "rope", "theta": rope.get("rope_theta") or 10000.0}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return positions
    if kind == "yarn":
        rope["attention_factor"] = rope.get("attention_factor") or _attention_factor(rope)
    known = {field.name for field in fields(rope_scalings[kind].Config)}
    options = {ours: rope[theirs] for theirs, ours in NAMES.items() if ours in known and rope.get(theirs) is not None}
    return positions | {"scaling": {"kind": kind, **options}}


def rope_parameters(positions: Any) -> dict[str, Any]:
    """Transformers' `rope_parameters` for our rotary positions."""
    if positions.scaling is None:
        return {"rope_type": "default", "rope_theta": positions.theta}
    options = vars(positions.scaling.options)
    written = {theirs: options[ours] for theirs, ours in NAMES.items() if options.get(ours) is not None}
    return {"rope_type": positions.scaling.kind, "rope_theta": positions.theta, **written}


def older_rope_settings(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """`rope_parameters` under the names that transformers 4 reads; it would take its defaults in silence."""
    rope = dict(parameters or {})
    if "rope_theta" not in rope:  # a model without rotary positions, or with others for every kind of layer
        return {}
    theta = rope.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}


def _attention_factor(rope: dict[str, Any]) -> float | None:
    """Yarn's factor from DeepSeek's two scales, where a configuration has them; None: the one of the paper."""
    numbers = [rope.get(name) for name in ("factor", "mscale", "mscale_all_dim")]
    factor, over, under = (float(number) if isinstance(number, (int, float)) else 0.0 for number in numbers)
    if not (over and under):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (growth * over + 1.0) / (growth * under + 1.0)
