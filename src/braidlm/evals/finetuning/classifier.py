"""A classifier made of a language model in memory: its body, and a new head that reads the last real token.

Texts are filled up behind their ends and nothing sees what stands behind it, so that no mask is needed: what the last
real token says is what it would say without any filling, on either side.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForSequenceClassification, BraidPreTrainedModel

HEAD = "score"
"""What the new head is called, in Braid and in transformers' decoders."""


def make_classifier(model: Any, outputs: int) -> nn.Module:
    """A copy of a language model's body with a head of so many outputs, all of it in float32 and ready to train.

    The head, and nothing else, comes out of torch's random numbers.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = outputs
    made = _empty_classifier(config)
    made.base_model.load_state_dict(model.base_model.state_dict())
    made.requires_grad_(True)
    return made.float().to(next(model.parameters()).device)


def _empty_classifier(config: Any) -> Any:
    if config.model_type == "braid":
        return BraidForSequenceClassification(config)
    from transformers import AutoModelForSequenceClassification

    try:
        made = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        made = None
    if made is None or not hasattr(made, HEAD):
        raise BraidError(
            f"transformers has no classifier for models of type '{config.model_type}'",
            todo="Fine-tune a Braid model, or one of a type that has (GPT-2, Llama, OPT, GPT-NeoX and others).",
        )
    return made


def classify(model: Any, ids: Tensor, lasts: Tensor) -> tuple[Tensor, Tensor | float]:
    """[texts, outputs] in float32, and what routers ask to be added to a loss.

    `ids` [texts, time] are filled up behind; `lasts` [texts] says where the last real token of each stands.
    """
    body = model.base_model(input_ids=ids, use_cache=False, return_dict=True)
    hidden = body.last_hidden_state
    read = hidden.gather(1, lasts[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    logits = getattr(model, HEAD)(read).float()
    if not isinstance(model, BraidPreTrainedModel) or not body.routings:
        return logits, 0.0
    real = torch.arange(ids.shape[1], device=ids.device) <= lasts[:, None]
    return logits, model.asked_by_routers(body.routings, hidden, real)
