"""What a head may learn beside its labels: the probabilities of teachers, from their logits or their top k tokens."""

from typing import NamedTuple

from torch import Tensor

ROUNDING = 1e-6
"""What the top k of a distribution leave below this is the rounding of their sum."""


class TeacherLogits(NamedTuple):
    """Teachers of a batch, and how much of the loss is theirs: text_weight x text + weight x KL(teachers || model)."""

    logits: tuple[Tensor, ...]
    """The logits of each teacher [batch, time, vocabulary]. A model may have more entries, which are of no token: the
    teachers give them no probability."""
    shares: tuple[float, ...]
    """The share of each teacher in the averaged probabilities; the shares add up to 1."""
    text_weight: float
    weight: float


class TopTokens(NamedTuple):
    """Teachers of a batch by the k tokens that the teachers find most probable; all other tokens are one event."""

    ids: Tensor
    """[batch, time, k]."""
    logs: Tensor
    """[batch, time, k] float32: the logarithms of their probabilities."""
    text_weight: float
    weight: float


SoftTargets = TeacherLogits | TopTokens


class TaughtLosses(NamedTuple):
    """The losses of a head that learns soft targets beside its labels."""

    weighted: Tensor
    """The weighted sum of both, which alone has a gradient."""
    text: Tensor
    divergence: Tensor
