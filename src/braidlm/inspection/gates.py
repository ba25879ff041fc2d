"""What gates do, over texts: each gated layer's output, and a text's loss after the layer, without and with the gate.

The same hook reads a Braid model and a decoder of transformers: a gate is called with the layer's input and output. For
the loss, the stream after a layer is read by the norm before the head and the head itself, as if the model ended there
(Self-MoE, Equations 3 and 4).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.inspection.layers import record_calls
from braidlm.inspection.texts import ProgressCallback, windows_of
from braidlm.model.gates import Gate
from braidlm.model.heads.losses import log_probabilities_of
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.gating import find_parts, gates_of

MAX_WINDOW = 1024
"""Tokens that are read at once, where the model's context is longer."""
TOKENS_PER_PASS = 4096
"""Tokens of all windows of a batch; the outputs of every layer are in memory at once."""


@dataclass(frozen=True)
class LayerOutputs:
    """What one gated layer gives in one pass, [window, time, width]."""

    gate: Gate
    hidden: Tensor
    plain: Tensor
    """The layer's output without the gate."""
    gated: Tensor

    @property
    def share(self) -> Tensor:
        """The norm of what the gate adds as a share of that of the layer's output without it, [window, time]."""
        # The difference of the outputs would be rounded to the larger stream's precision.
        nothing = torch.zeros_like(self.hidden)
        added = nothing if self.gate.is_off else self.gate.add(self.hidden, nothing)
        norm = self.plain.double().norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        return added.double().norm(dim=-1) / norm


def context_limit(model: Any) -> int:
    """Tokens of a window: the model's context, or MAX_WINDOW if that is less."""
    return min(getattr(model.config, "max_position_embeddings", None) or MAX_WINDOW, MAX_WINDOW)


@torch.no_grad()
def gate_passes(
    model: Any, texts: Sequence[Sequence[int]], advance: ProgressCallback | None = None
) -> Iterator[tuple[list[int], Tensor, Tensor, dict[int, LayerOutputs]]]:
    """Run a gated model over texts, in windows; what every gate reads and gives is recorded.

    Yields the index of each window's text, ids and mask [window, time], and the outputs by the numbers of the gated
    layers, counted from 1.
    """
    gates, size, done = gates_of(model), context_limit(model), 0
    with record_calls(gates) as calls:
        for windows in windows_of(texts, size, max(1, TOKENS_PER_PASS // size)):
            ids, mask = windows.padded(model.device)
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            layers = {at: LayerOutputs(gates[at], hidden, plain, out) for at, ((hidden, plain), out) in calls.items()}
            yield windows.texts, ids, mask, layers
            done += windows.tokens
            if advance is not None:
                advance(done, "")


@dataclass
class GateActivity:
    """One gate, and what it does to its layer's output over all tokens."""

    layer: int
    """Counted from 1."""
    activation: float
    """The mean size of the layer's outputs, over tokens and channels, with the gate."""
    activation_without: float
    mean: float
    """The mean of the layer's outputs themselves, with the gate."""
    mean_without: float
    relative: float
    """The norm of what the gate adds as a share of the norm of the layer's output without it, mean over tokens."""
    gain: float
    """How far the gate has moved from zero: by what factor it scales a random input, in the root mean square."""
    by_domain: dict[str, float] = field(default_factory=dict)
    """`relative` over the texts of each domain."""


@dataclass
class ModelGates:
    name: str
    folder: str
    kind: str
    """Vector, scalar or matrix."""
    tokens: int
    layers: list[GateActivity]

    @property
    def findings(self) -> list[str]:
        """What stands out: gates that are still zero."""
        zero = [str(one.layer) for one in self.layers if one.gain == 0.0 and one.relative == 0.0]
        if not zero:
            return []
        if len(zero) == len(self.layers):
            return ["no gate has moved from zero: the model is its base"]
        gates = "gate of layer" if len(zero) == 1 else "gates of layers"
        return [f"the {gates} {', '.join(zero)} {'is' if len(zero) == 1 else 'are'} still zero"]


def _sums(layer: LayerOutputs, chosen: Tensor) -> Tensor:
    """Sums over chosen tokens of a layer, in float64: their number, four means over channels, and the gate's share."""
    plain, gated = (one[chosen].double() for one in (layer.plain, layer.gated))
    share = layer.share[chosen]
    means = [gated.abs().mean(-1), plain.abs().mean(-1), gated.mean(-1), plain.mean(-1), share]
    return torch.stack([torch.ones_like(share).sum(), *(one.sum() for one in means)]).cpu()


@torch.no_grad()
def measure_gates(
    model: Any, texts: Sequence[Sequence[int]], domains: Sequence[str | None], advance: ProgressCallback | None = None
) -> list[GateActivity]:
    """What each gate of a model does over texts, each of which has a domain or none."""
    gates = gates_of(model)
    names = list(dict.fromkeys(domains))
    sums = {(number, name): torch.zeros(6, dtype=torch.float64) for number in gates for name in names}
    widths: dict[int, int] = {}
    for of_texts, _, mask, layers in gate_passes(model, texts, advance):
        of_rows = [domains[text] for text in of_texts]
        for domain in set(of_rows):
            rows = torch.tensor([name == domain for name in of_rows], device=mask.device)
            chosen = mask.bool() & rows[:, None]
            for number, layer in layers.items():
                sums[number, domain] += _sums(layer, chosen.to(layer.plain.device))
                widths[number] = layer.plain.shape[-1]
    activities = []
    for number, gate in gates.items():
        of_domains = {name: sums[number, name] for name in names}
        tokens, *totals = sum(of_domains.values(), torch.zeros(6, dtype=torch.float64)).tolist()
        shares = {name: float(own[-1] / own[0]) for name, own in of_domains.items() if name is not None}
        size, size_without, mean, mean_without, relative = (total / tokens for total in totals)
        gain = gain_of(gate, widths[number])
        activities.append(GateActivity(number, size, size_without, mean, mean_without, relative, gain, shares))
    return activities


@torch.no_grad()
def gain_of(gate: Gate, width: int) -> float:
    """The root mean square of the singular values of what a gate computes: of a scalar gate, the scalar's size.

    The bias of a gate is no part of its gain.
    """
    parameter = next(gate.parameters())
    rows = torch.eye(width, device=parameter.device, dtype=parameter.dtype)
    bias = gate(rows[:1] * 0)
    return float(sum((gate(part) - bias).double().square().sum() for part in rows.split(512)) / width) ** 0.5


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


@torch.no_grad()
def gate_lens(model: Any, texts: Sequence[Sequence[int]], advance: ProgressCallback | None = None) -> list[LayerLens]:
    """The loss after each gated layer, without and with its gate, over all tokens that follow another in a window.

    A layer whose stream is not as wide as the head's input cannot be read, and is left out.
    """
    braid = isinstance(model, BraidForCausalLM)
    parts: Any = model.model if braid else find_parts(model)
    head = model.head if braid else parts.head
    width = parts.width_out if braid else parts.width
    device = next(head.parameters()).device

    def loss_sum(stream: Tensor, tokens: Tensor) -> float:
        """The summed negative log-probability of tokens [token], each predicted from a row of stream [token, width]."""
        total = 0.0
        for rows, wanted in zip(stream.split(ROWS), tokens.to(device).split(ROWS), strict=True):
            hidden, each = parts.norm(rows).to(device), torch.arange(len(wanted), device=device)
            scored = head.log_probabilities if braid else log_probabilities_of
            total -= scored(hidden if braid else head(hidden), each, wanted).double().sum().item()
        return total

    sums = {number: [0.0, 0.0] for number in gates_of(model)}
    count = 0
    for _, ids, mask, layers in gate_passes(model, texts, advance):
        real = mask[:, 1:].bool()
        tokens = ids[:, 1:][real]
        count += len(tokens)
        for number, layer in layers.items():
            if layer.plain.shape[-1] != width:
                sums.pop(number, None)
                continue
            chosen = real.to(layer.plain.device)
            for side, stream in enumerate((layer.plain, layer.gated)):
                sums[number][side] += loss_sum(stream[:, :-1][chosen], tokens)
    if not count:
        raise BraidError("the text has no two tokens in a row, so there is nothing to predict")
    return [LayerLens(number, without / count, loss / count) for number, (without, loss) in sums.items()]
