"""Softmax attention by plain products: transformers' "eager" attention, whose weights can be seen.

`F.scaled_dot_product_attention` computes the same faster and without keeping the weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Tensor]:
    """Outputs [batch, head, time, dim] and weights [batch, head, time, key]; several heads may share keys and values.

    `mask` is true where a query sees a key. Without one, with `causal`, it sees those up to its own position.
    """
    shared_by = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared_by, dim=1) for x in (key, value))
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # In float32 or wider: the sum of many small numbers would be rounded.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = F.dropout(scores.softmax(-1, dtype=wide).to(query.dtype), dropout)
    return weights @ value, weights
