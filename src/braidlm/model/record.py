"""What callers may ask to see of each layer: the stream after it and its attention weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerRecord:
    """Filled during one forward pass; a list that nobody asked for is None."""

    hidden_states: list[Tensor] | None = None
    """The embedded tokens, then the stream after each layer; the last one after the norm before the head."""
    attentions: list[Tensor] | None = None
    """For each layer [batch, head, time, key]: the heads of all its paths or experts, in their order."""
    _of_layer: list[Tensor] = field(default_factory=list)

    def begin(self, hidden: Tensor) -> None:
        """Record the embedded tokens."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)

    def add_weights(self, weights_BNTS: Tensor) -> None:
        """Record the weights of one attention of the current layer."""
        if self.attentions is not None:
            self._of_layer.append(weights_BNTS)

    def end_layer(self, hidden: Tensor) -> None:
        """Record the stream after a layer, and the weights of its attentions as one tensor."""
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)
        if self.attentions is not None:
            # A layer has no attention if none of its paths has a block there.
            no_heads = hidden.new_empty(len(hidden), 0, hidden.shape[1], 0)
            self.attentions.append(torch.cat(self._of_layer, dim=1) if self._of_layer else no_heads)
        self._of_layer = []

    def end(self, normed: Tensor) -> None:
        """Replace the last stream by the normalised one, as transformers' users expect."""
        if self.hidden_states is not None:
            self.hidden_states[-1] = normed
