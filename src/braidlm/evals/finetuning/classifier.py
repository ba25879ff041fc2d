"""A classifier made of a language model in memory: its body, and a new head on the last token of a text.

Texts are padded on the right and attention is causal, so that no mask is needed: the hidden state of the last token is
what it would be without padding. The members of an average answer apart, each by its own part of the head: each is
trained on its own loss, and their probabilities are averaged. Special tokens around and between two texts are the
tokenizer's; of two texts that are too long together the longer is truncated first, as in transformers.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.requests import BATCH
from braidlm.kernels.lower import replace_parts
from braidlm.model.modeling_braid import BraidForSequenceClassification
from braidlm.model.paths.average import AverageHead
from braidlm.model.pretrained import BraidPreTrainedModel

HEAD = "score"
"""The name of the new head, in Braid and in transformers' decoders."""
MEMBERS = "parts_of_members"
"""The name of a classifier's buffer [members, width] with ones where a member's part of the stream is."""


def make_classifier(model: Any, outputs: int) -> nn.Module:
    """A copy of a language model's body with a head of so many outputs, in float32 and with gradients.

    Only the head is initialised from torch's random numbers.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = outputs
    classifier: Any = None
    if config.model_type == "braid":
        classifier = BraidForSequenceClassification(config)
    else:
        with contextlib.suppress(ValueError):  # raised where transformers has no classifier of this type
            classifier = AutoModelForSequenceClassification.from_config(config)
    if not hasattr(classifier, HEAD):
        todo = "Fine-tune a Braid model, or one of a type that has (GPT-2, Llama, OPT, GPT-NeoX and others)."
        raise BraidError(f"transformers has no classifier for models of type '{config.model_type}'", todo=todo)
    classifier.base_model.load_state_dict(model.base_model.state_dict())
    classifier.requires_grad_(True)
    head = getattr(model, "head", None)
    if isinstance(head, AverageHead):
        parts = torch.eye(len(head.widths)).repeat_interleave(torch.tensor(head.widths), dim=1)
        classifier.register_buffer(MEMBERS, parts[head.active], persistent=False)
    classifier.float().to(next(model.parameters()).device)
    replace_parts(classifier)
    return classifier


def classify(model: Any, ids: Tensor, last_positions: Tensor) -> tuple[Tensor, Tensor | float]:
    """[texts, outputs] in float32, and the routing losses to be added to a loss.

    `ids` [texts, time] are padded on the right; `last_positions` [texts] say where texts end. Of an average,
    numbers are the mean of its members', and classes the logarithms of averaged probabilities.
    """
    outputs, routing_loss = member_outputs(model, ids, last_positions)
    if len(outputs) == 1:
        return outputs[0], routing_loss
    return outputs.mean(0) if outputs.shape[-1] == 1 else outputs.softmax(-1).mean(0).log(), routing_loss


def member_outputs(model: Any, ids: Tensor, last_positions: Tensor) -> tuple[Tensor, Tensor | float]:
    """[members, texts, outputs] of the members of an average before they are averaged; any other model is one member.

    The routing losses are the sum over the members.
    """
    body = model.base_model(input_ids=ids, use_cache=False, return_dict=True)
    hidden = body.last_hidden_state
    last = hidden.gather(1, last_positions[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    parts = getattr(model, MEMBERS, None)
    outputs = getattr(model, HEAD)(last[None] if parts is None else last * parts[:, None]).float()
    if not isinstance(model, BraidPreTrainedModel) or not body.routings:
        return outputs, 0.0
    real = torch.arange(ids.shape[1], device=ids.device) <= last_positions[:, None]
    return outputs, model.routing_loss_in_training(body.routings, hidden, real)


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as tokens, padded on the right, on the device."""

    ids: Tensor
    lengths: np.ndarray
    """[texts] tokens without padding, at least one."""
    last_positions: Tensor

    def __len__(self) -> int:
        return len(self.lengths)


def encode(
    tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str | None]], max_length: int, device: torch.device
) -> EncodedTexts:
    """Texts, or pairs of texts, as tokens, truncated to `max_length`."""
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.enable_truncation(max_length)
    placeholder = [tokenizer.eos_id or 0]  # a text may be empty after normalisation
    inputs = [first if second is None else (first, second) for first, second in texts]
    batches = (inputs[start : start + BATCH] for start in range(0, len(inputs), BATCH))
    rows = [encoding.ids or placeholder for batch in batches for encoding in backend.encode_batch_fast(batch)]
    lengths = np.array([len(row) for row in rows])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return EncodedTexts(ids.to(device), lengths, torch.from_numpy(lengths - 1).to(device))
