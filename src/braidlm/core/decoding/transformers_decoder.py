"""Decoding with any causal language model of transformers: its own cache behind the interface of our decoder."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from braidlm.core.decoding.decoder import Decoder, TokenDecoder
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.span import positions_from_mask


class TransformersDecoder:
    """Decodes texts of at most `length` tokens with a model of transformers, which keeps keys and values itself."""

    mean_layer = None
    accepted_share = None

    def __init__(self, model: PreTrainedModel, length: int):
        limit = context_of(model)
        self.model: Any = model.eval()
        self.length = length if limit is None else min(length, limit)
        self.device = model.device
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.past: Any = None
        self.mask = torch.ones(1, 0, dtype=torch.long, device=self.device)

    @property
    def filled(self) -> int:
        return self.mask.shape[1]

    @torch.inference_mode()
    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Start anew with prompts [batch, time], padded on the left where `mask` is 0; gives the next logits."""
        if ids.shape[1] >= self.length:
            raise BraidError(
                f"the prompt has {ids.shape[1]} tokens, and the model's limit is {self.length}",
                todo="Shorten the prompt.",
            )
        self.past = None
        self.mask = torch.ones_like(ids) if mask is None else mask
        return self._forward(ids)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after one more token of each text."""
        self.mask = torch.cat((self.mask, torch.ones_like(tokens[:, None])), dim=1)
        return self._forward(tokens[:, None])

    def _forward(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {}
        if not bool(self.mask.all()):
            inputs["attention_mask"] = self.mask
            if self.takes_positions:
                inputs["position_ids"] = positions_from_mask(self.mask, ids.shape[1])
        output = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, return_dict=True, **inputs)
        self.past = output.past_key_values
        return output.logits[:, -1]  # type: ignore[no-any-return]


def decoder_for(model: PreTrainedModel, batch: int, length: int) -> TokenDecoder:
    """The plain decoder of a model, Braid's or transformers', for `batch` texts of at most `length` tokens."""
    if isinstance(model, BraidForCausalLM):
        return Decoder(model, batch, length)
    return TransformersDecoder(model, length)


def context_of(model: PreTrainedModel) -> int | None:
    """The most tokens that the positions of a model of transformers are made for, if its configuration says so."""
    return getattr(model.config, "max_position_embeddings", None)
