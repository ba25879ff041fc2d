"""What a head may learn beside its labels: the averaged probabilities of teachers."""

from typing import NamedTuple

from torch import Tensor


class SoftTargets(NamedTuple):
    """Teachers of a batch, and how much of the loss is theirs: text_weight x text + weight x KL(teachers || model)."""

    logits: tuple[Tensor, ...]
    """Of each teacher [batch, time, vocabulary]. A model may have more entries, which are of no token: to those the
    teachers give no probability."""
    shares: tuple[float, ...]
    """Of each teacher in the averaged probabilities; they add up to 1."""
    text_weight: float
    weight: float


class TaughtLosses(NamedTuple):
    """The losses of a head that learns soft targets beside its labels."""

    weighted: Tensor
    """The weighted sum of both, which alone has a gradient."""
    text: Tensor
    divergence: Tensor
