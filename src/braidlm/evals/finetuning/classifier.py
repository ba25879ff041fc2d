"""A classifier made of a language model in memory: its body, and a new head on the last token of a text.

Texts are padded on the right and attention is causal, so that no mask is needed: the hidden state of the last token is
what it would be without padding.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForSequenceClassification, BraidPreTrainedModel

HEAD = "score"
"""The name of the new head, in Braid and in transformers' decoders."""


def make_classifier(model: Any, outputs: int) -> nn.Module:
    """A copy of a language model's body with a head of so many outputs, in float32 and with gradients.

    Only the head is initialised from torch's random numbers.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = outputs
    classifier = _empty_classifier(config)
    classifier.base_model.load_state_dict(model.base_model.state_dict())
    classifier.requires_grad_(True)
    return classifier.float().to(next(model.parameters()).device)


def _empty_classifier(config: Any) -> Any:
    if config.model_type == "braid":
        return BraidForSequenceClassification(config)
    from transformers import AutoModelForSequenceClassification

    try:
        classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        classifier = None
    if classifier is None or not hasattr(classifier, HEAD):
        raise BraidError(
            f"transformers has no classifier for models of type '{config.model_type}'",
            todo="Fine-tune a Braid model, or one of a type that has (GPT-2, Llama, OPT, GPT-NeoX and others).",
        )
    return classifier


def classify(model: Any, ids: Tensor, last_positions: Tensor) -> tuple[Tensor, Tensor | float]:
    """[texts, outputs] in float32, and the routing losses to be added to a loss.

    `ids` [texts, time] are padded on the right; `last_positions` [texts] are those of the last tokens.
    """
    body = model.base_model(input_ids=ids, use_cache=False, return_dict=True)
    hidden = body.last_hidden_state
    last = hidden.gather(1, last_positions[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    logits = getattr(model, HEAD)(last).float()
    if not isinstance(model, BraidPreTrainedModel) or not body.routings:
        return logits, 0.0
    real = torch.arange(ids.shape[1], device=ids.device) <= last_positions[:, None]
    return logits, model.routing_loss_in_training(body.routings, hidden, real)
