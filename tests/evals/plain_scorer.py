"""The slow, plain way to score: one text at a time, all logits, straight from the definition."""

from typing import Any

import torch


@torch.no_grad()
def plain_tokens(model: Any, ids: list[int], first: int = 1) -> list[float]:
    """The log-probability of each token from `first` on, given all before it."""
    if len(ids) < 2:
        return []
    logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].double()
    chances = logits.log_softmax(-1)
    return [float(chances[at - 1, ids[at]]) for at in range(first, len(ids))]


def plain_sum(model: Any, ids: list[int], first: int = 1) -> float:
    """The log-probability of a continuation."""
    return sum(plain_tokens(model, ids, first))
