"""Factors of weights: what a step multiplies a weight by before its update, such as a decay with its own schedule."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def factors_of(parameters: Sequence[Tensor], factors: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The factor of each parameter on its device, 1 for one that has none; a kernel reads them there in each step."""
    one = torch.ones((), device=parameters[0].device)
    return [factors.get(parameter, one) for parameter in parameters]
