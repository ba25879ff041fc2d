"""The record of a router's choices: a value that losses, analysis, pruning and early exit read."""

from dataclasses import dataclass

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
    chosen_BTK: Tensor
    weights_BTK: Tensor


Routings = tuple[Routing, ...]
