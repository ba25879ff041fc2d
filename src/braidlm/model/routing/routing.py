"""The record of a router's choices, which losses, analysis, pruning and early exit read."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..exporting import exported

COMBINED = "combined"  # the name of a join's last choice, the linear combination of all its paths


@exported
@dataclass
class Routing:
    """What one router chose for each token.

    Shapes: B batch, T time, N choices, K chosen.
    """

    name: str
    """The module name of the router, e.g. `stages.2.layers.0.join`."""
    choices: tuple[str, ...]  # the names of the paths or experts to choose from
    probabilities_BTN: Tensor  # the softmax of the router's scores, without noise
    chosen_BTK: Tensor  # the indices of the chosen ones
    weights_BTK: Tensor  # the weight of each chosen one in the output, noise included
    losses: dict[str, float] = field(default_factory=dict)
    """The routing losses that are added to the training loss, with their weights."""
    scores_BTN: Tensor | None = None  # the scores before the softmax, for losses that read them
    new_rows: Tensor | None = None
    """The router's parameters of choices that were inserted later, [new choice, inputs]."""
    present_BT: Tensor | None = None
    """The tokens that count, where others pass by its layer or take another path; None: all of them."""

    def present_of(self, real_BT: Tensor) -> Tensor:
        """The real tokens that this routing is about."""
        return real_BT if self.present_BT is None else real_BT.bool() & self.present_BT

    @property
    def takers_NBT(self) -> Tensor:
        """For each choice, the tokens that chose it."""
        chosen_BTN = torch.zeros_like(self.probabilities_BTN, dtype=torch.bool).scatter(-1, self.chosen_BTK, True)
        return chosen_BTN.permute(2, 0, 1)

    @property
    def weights_BTN(self) -> Tensor:
        """The weights of all choices, 0 for those not chosen."""
        zeros = torch.zeros_like(self.probabilities_BTN, dtype=self.weights_BTK.dtype)
        return zeros.scatter_add(-1, self.chosen_BTK, self.weights_BTK)

    @property
    def main_BT(self) -> Tensor:
        """The choice with the largest weight for each token."""
        return self.chosen_BTK.gather(-1, self.weights_BTK.argmax(-1, keepdim=True))[..., 0]


Routings = tuple[Routing, ...]
