"""Loss on held-out text, as perplexity and as bits per byte."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from braidlm.data.loading.validation import ValidationSet
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.precision import autocast


@dataclass
class Score:
    """How well a model predicts a text."""

    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float
    """Comparable between tokenizers."""
    tokens: int
    bytes: int


@torch.no_grad()
def score_text(model: BraidForCausalLM, text: ValidationSet, dtype: torch.dtype = torch.float32) -> Score:
    """Every token of the text predicted once."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, labels in text:
        used = (labels != IGNORED).any(1)  # rows that are only filling cost nothing
        tokens, targets = (torch.from_numpy(a[used]).to(device) for a in (inputs, labels))
        with autocast(device, dtype):
            total += model.text_loss(tokens, targets, 1.0).double()
    model.train(was_training)
    nats = total.item()
    loss = nats / text.tokens
    return Score(loss, safe_exp(loss), nats / math.log(2) / text.bytes, text.tokens, text.bytes)


def safe_exp(value: float) -> float:
    """exp without overflow."""
    return math.exp(value) if value < 700 else math.inf


def mean_bits_per_byte(scores: Iterable[Score]) -> float:
    """Bits per byte over several texts, each weighed by its bytes."""
    listed = list(scores)
    return sum(s.bits_per_byte * s.bytes for s in listed) / sum(s.bytes for s in listed)
