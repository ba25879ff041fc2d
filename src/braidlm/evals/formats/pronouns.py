"""Does a model agree pronouns with the character they stand for? The built-in stories' own test."""

from collections.abc import Sequence
from typing import Protocol

import torch

from braidlm.data.corpora.stories.generator import PronounPair
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM


class Encoder(Protocol):
    """Text to tokens."""

    def encode(self, text: str) -> list[int]: ...


@torch.inference_mode()
def pronoun_accuracy(model: BraidForCausalLM, tokenizer: Encoder, pairs: Sequence[PronounPair]) -> float:
    """The share of pairs in which the agreeing pronoun is more probable than the other."""
    right = [_log_probability(model, tokenizer, pair.prefix, pair.right) for pair in pairs]
    wrong = [_log_probability(model, tokenizer, pair.prefix, pair.wrong) for pair in pairs]
    return sum(r > w for r, w in zip(right, wrong, strict=True)) / len(pairs)


def _log_probability(model: BraidForCausalLM, tokenizer: Encoder, prefix: str, word: str) -> float:
    """The log-probability of a word after a prefix, within the model's context."""
    context = tokenizer.encode(prefix)
    whole = context + tokenizer.encode(word)
    inputs, targets = whole[:-1], whole[1:]
    first = len(context) - 1
    targets = [IGNORED] * first + targets[first:]
    limit = model.config.max_position_embeddings
    device = next(model.parameters()).device
    ids = torch.tensor([inputs[-limit:]], device=device)
    labels = torch.tensor([targets[-limit:]], device=device)
    return -float(model.text_loss(ids, labels, 1.0))
