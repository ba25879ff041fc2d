"""The model during a training: its loss on held-out text, and samples of its own text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from braidlm.core.decoding.decoder import Sampling
from braidlm.data.loading.validation import ValidationSet
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.heads.losses import IGNORED
from braidlm.training.config import SampleConfig
from braidlm.training.step.precision import autocast
from braidlm.training.trainables.trainable import Trainable


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
def score_text(trained: Trainable, text: ValidationSet, dtype: torch.dtype = torch.float32) -> Score:
    """Score every token of the text once."""
    model = trained.model
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, labels in text:
        used = (labels != IGNORED).any(1)  # rows of padding only are skipped
        tokens, targets = (torch.from_numpy(a[used]).to(device) for a in (inputs, labels))
        with autocast(device, dtype):
            total += trained.text_loss(tokens, targets).double()
    model.train(was_training)
    nats = total.item()
    loss = nats / text.tokens
    return Score(loss, safe_exp(loss), nats / math.log(2) / text.bytes, text.tokens, text.bytes)


def safe_exp(value: float) -> float:
    """exp without overflow."""
    return math.exp(value) if value < 700 else math.inf


def mean_bits_per_byte(scores: Iterable[Score]) -> float:
    """Bits per byte over several texts, weighted by their bytes."""
    listed = list(scores)
    return sum(s.bits_per_byte * s.bytes for s in listed) / sum(s.bytes for s in listed)


def write_samples(
    trained: Trainable, tokenizer: BraidTokenizer, config: SampleConfig, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs; sampling has a generator of its own, so the training's random state stays."""
    texts = ["" for _ in config.prompts]
    was_training = trained.model.training
    sampling = Sampling(temperature=config.temperature, seed=seed)
    for piece in trained.continue_text(tokenizer, config.prompts, config.tokens, sampling):
        texts[piece.prompt] += piece.text
    trained.model.train(was_training)
    return list(zip(config.prompts, texts, strict=True))
