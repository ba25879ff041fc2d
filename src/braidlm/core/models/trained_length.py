"""How many tokens a model was trained on at once, as its lineage says."""

from collections.abc import Mapping
from typing import Any

LENGTH = "length"
"""The key under which the record of an edit's source keeps it, because an edited model has no recipe of its own."""


def trained_length(lineage: Mapping[str, Any] | None) -> int | None:
    """The length of its recipe, or the largest of the models that it was made of; None where it is not known."""
    lineage = lineage or {}
    recipe = lineage.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    holders = [data] if isinstance(data, dict) else lineage.get("sources") or []
    lengths = [holder.get(LENGTH) for holder in holders]
    return max((length for length in lengths if isinstance(length, int) and length > 0), default=None)
