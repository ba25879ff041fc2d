"""Folding gates away: which of them the weights of a model can take over exactly, and why the others cannot.

A gate at zero can always go. Any other changes the residual itself: with a factor g, a layer h + f(h) becomes
(1 + g) h + f(h), and the stream would have to be divided by 1 + g from there on.

- In a layer of two sublayers, h + a(h) + m(h + a(h)), the second reads what the first added. Divided, a(h) would have
  to be two things: a(h) for m to read, and a(h) / (1 + g) in the sum. No weight can be both.
- Where both sublayers read the same stream (GPT-NeoX), one factor for all channels could be taken over by the weights
  that write the stream, since norms do not see the scale of what they read, but for their epsilon: each norm after it
  would need an epsilon of its own, divided by (1 + g)^2, and a configuration of transformers has one for all.
- Factors that differ between channels, and matrices, change what a norm divides by.

So no gate that is not zero is folded: the result would be another function, and what it computes could not be saved.
"""

from typing import Any

from transformers import PreTrainedModel

from braidlm.model.gates import Gate, ScalarGate, VectorGate
from braidlm.opening.gating import detach, gates_of

REASONS: dict[type[Gate], str] = {
    ScalarGate: "it scales the residual, and what reads the stream inside the layer or behind it would have to change",
    VectorGate: "its factors differ between channels, and norms behind it would divide by something else",
}
MATRIX = "it mixes channels of the residual, around which no weight of the layer goes"


def is_zero(gate: Any) -> bool:
    """Whether a gate adds nothing to any stream."""
    bias, down = getattr(gate, "bias", None), getattr(gate, "down", None)
    if bias is not None and bool(bias.any()):
        return False
    return not bool(gate.weight.any()) or (down is not None and not bool(down.any()))


def folding_refusals(model: Any) -> dict[int, str]:
    """The gates of a decoder or a Braid model that cannot be folded away exactly, by layer, and why."""
    return {number: REASONS.get(type(gate), MATRIX) for number, gate in gates_of(model).items() if not is_zero(gate)}


def fold(model: PreTrainedModel) -> dict[int, str]:
    """Take the gates of a decoder away that can go without changing a bit; the others stay, with the reasons."""
    refused = folding_refusals(model)
    detach(model, [number for number in gates_of(model) if number not in refused])
    return refused
