"""Per-layer perplexity through the head, without and with each gate's output (Self-MoE, Equations 3 and 4).

The stream after a layer is read by the norm before the head and the head itself, as if the model ended there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.inspection.gates import gate_passes
from braidlm.model.heads.losses import log_probabilities_of
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.gating import gates_of
from braidlm.opening.structure import find_parts

ROWS = 1024
"""Tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class LayerLens:
    """What a text costs, in nats per token, if it is predicted from the stream after one layer."""

    layer: int
    """Counted from 1."""
    loss_without: float
    """Without the output of the layer's gate."""
    loss: float
    """With it."""

    @property
    def change(self) -> float:
        """The logarithm of the perplexity's ratio: below zero where the gate helps; 0.01 is about one percent."""
        return self.loss - self.loss_without

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def perplexity_without(self) -> float:
        return perplexity(self.loss_without)


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite where a floating point number cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Lens:
    """The norm before a model's head, and the head."""

    def __init__(self, model: Any):
        self.norm: nn.Module
        self.score: Callable[[Tensor, Tensor, Tensor], Tensor]
        if isinstance(model, BraidForCausalLM):
            self.norm, self.head, self.width = model.model.norm, model.head, model.model.width_out
            self.score = model.head.log_probabilities
        else:
            parts = find_parts(model)
            self.norm, self.head, self.width = parts.norm, parts.head, parts.width
            self.score = lambda hidden, rows, tokens: log_probabilities_of(self.head(hidden), rows, tokens)

    def loss_sum(self, stream: Tensor, tokens: Tensor) -> float:
        """The summed negative log-probability of tokens [token], each predicted from a row of stream [token, width]."""
        total = 0.0
        device = next(self.head.parameters()).device
        for rows, wanted in zip(stream.split(ROWS), tokens.split(ROWS), strict=True):
            hidden, each = self.norm(rows).to(device), torch.arange(len(wanted), device=device)
            total -= self.score(hidden, each, wanted.to(device)).double().sum().item()
        return total


@torch.no_grad()
def gate_lens(
    model: Any, texts: Sequence[Sequence[int]], advance: Callable[[float, str], None] | None = None
) -> list[LayerLens]:
    """The loss after each gated layer, without and with its gate, over all tokens that follow another in a window.

    A layer whose stream is not as wide as the head's input cannot be read, and is left out.
    """
    lens = Lens(model)
    sums = {number: [0.0, 0.0] for number in gates_of(model)}
    count = 0
    for one in gate_passes(model, texts, advance):
        real = one.mask[:, 1:].bool()
        tokens = one.ids[:, 1:][real]
        count += len(tokens)
        for number, layer in one.layers.items():
            if layer.plain.shape[-1] != lens.width:
                sums.pop(number, None)
                continue
            chosen = real.to(layer.plain.device)
            for side, stream in enumerate((layer.plain, layer.gated)):
                sums[number][side] += lens.loss_sum(stream[:, :-1][chosen], tokens)
    if not count:
        raise BraidError("the text has no two tokens in a row, so there is nothing to predict")
    return [LayerLens(number, without / count, loss / count) for number, (without, loss) in sums.items()]
