"""The record of a router's choices: a value that losses, analysis, pruning and early exit read."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Routing:
    """Who chose what for each token, in one place of the model.

    Shapes: B batch, T time, N things to choose from, K chosen.
    """

    name: str
    """The address of the router, e.g. `stages.2.layers.0.join`."""
    choices: tuple[str, ...]
    """The names of the things chosen from."""
    probabilities_BTN: Tensor
    """The router's own, without noise."""
    chosen_BTK: Tensor
    weights_BTK: Tensor
    """What each chosen thing counts in the output, noise included."""
    losses: dict[str, float] = field(default_factory=dict)
    """What is to be added to the training loss: names of routing losses with their weights."""
    scores_BTN: Tensor | None = None
    """What the probabilities are the softmax of, where a loss may want it."""

    @property
    def weights_BTN(self) -> Tensor:
        """The weights of all things, 0 for those not chosen."""
        empty = torch.zeros_like(self.probabilities_BTN, dtype=self.weights_BTK.dtype)
        return empty.scatter_add(-1, self.chosen_BTK, self.weights_BTK)

    @property
    def main_BT(self) -> Tensor:
        """Of each token, the choice that counts most."""
        return self.chosen_BTK.gather(-1, self.weights_BTK.argmax(-1, keepdim=True))[..., 0]


Routings = tuple[Routing, ...]
