"""KL(teachers || model) at a temperature: over the whole vocabulary, or over the teachers' top k and one event more."""

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from braidlm.kernels.taught.soft_targets import ROUNDING


def averaged_log_probabilities(logits: Iterable[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
    """The logarithm of the teachers' probabilities [..., vocabulary], averaged by weights that add up to 1.

    Logits that are computed as they are asked for are dropped one by one. They have no gradient.
    """
    scaled = (each if temperature == 1 else each.float() / temperature for each in logits)
    logs = (
        torch.log_softmax(each, -1, dtype=torch.float32).add_(math.log(weight))
        for each, weight in zip(scaled, weights, strict=True)
    )
    return functools.reduce(torch.logaddexp, logs)


def divergence(teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] of log-probabilities [..., vocabulary] of the teachers from a model whose logits may have more entries.

    Entries that the teachers do not have are those of no token: there the teachers' probability is 0.
    """
    own = torch.log_softmax(logits.float() / temperature, -1)[..., : teacher.shape[-1]]
    return _expected_difference(teacher, own).sum(-1)


def top_k_divergence(ids: Tensor, teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] over k tokens `ids` [..., k], whose log-probabilities the teachers gave, and all others as one event.

    It is the divergence of two coarser distributions: at most `divergence`, and equal to it with k = vocabulary.
    """
    scaled = logits.float() / temperature
    total = scaled.logsumexp(-1)
    of_k = _expected_difference(teacher, scaled.gather(-1, ids) - total[..., None]).sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return of_k
    # Not 1 - sum: the model may leave the others less than float32 resolves beside 1.
    others = scaled.scatter(-1, ids, torch.finfo(scaled.dtype).min).logsumexp(-1) - total
    left = 1.0 - teacher.exp().sum(-1)
    left = torch.where(left > ROUNDING, left, 0.0)
    return of_k + _expected_difference(left.log(), others)


def _expected_difference(teacher: Tensor, own: Tensor) -> Tensor:
    """p (log p - log q), 0 where p is."""
    there = teacher > -torch.inf
    difference = torch.where(there, teacher, 0.0) - torch.where(there, own, 0.0)
    return teacher.exp() * difference
