"""What the model, the language model and the classifier share: their outputs, and how transformers handles them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from .attention.backend import check_implementation
from .config.braid_config import BraidConfig
from .initialisation import Initialisation, ModelShape, initialisations
from .language_model import tie
from .paths.switches import freeze, switch_off_modules
from .routing.losses import routing_loss
from .routing.routing import Routings


@dataclass
class BraidModelOutput(BaseModelOutputWithPast):
    """transformers' output, with routings."""

    routings: Routings | None = None
    """The routing of every router, in the order of the stages; None if the model has no router."""
    read: dict[str, Tensor] | None = None
    """What the language model's head has read in the text beside the hidden state, if it reads the text."""


@dataclass
class BraidCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, with routings."""

    routings: Routings | None = None


@dataclass
class BraidSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """transformers' output, with routings."""

    routings: Routings | None = None


class BraidPreTrainedModel(PreTrainedModel):
    """What the three classes share: initialisation, freezing, switches and transformers' settings."""

    config_class = BraidConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_cache_class = True  # what transformers before version 5 asks for
    _skip_keys_device_placement = ["past_key_values"]
    tied: dict[str, str]  # the name of every parameter that is another one too, and the name that it is saved under

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """What transformers ties; by itself it would tie nothing where head and embedding are apart."""
        return dict(self.tied)

    def _tie_weights(self) -> None:
        """What transformers before version 5 calls: it ties head and embedding by itself, and nothing else."""
        tie(self)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Yes: transformers guesses from the source text, and would ignore `set_attn_implementation`."""
        return True

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        """Refuse in our words what transformers would refuse as not supported yet."""
        check_implementation(attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @cached_property
    def _initialise(self) -> Initialisation:
        architecture = self.config.decoded
        shape = ModelShape(architecture.width, max(1, architecture.depth))
        return initialisations.build(architecture.initialisation, shape)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        self._initialise(module, writes_stream=getattr(module, "writes_stream", False))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, then freeze the parts in `config.frozen`: loading replaces every parameter."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        freeze(model, model.config.frozen)
        return loaded

    def switch_off(self, *modules: str) -> None:
        """Let routers choose none of these modules, by names or patterns, and all others again."""
        switch_off_modules(self, modules)

    def routing_loss_in_training(
        self, routings: Routings | None, hidden: Tensor, mask: Tensor | None
    ) -> Tensor | float:
        """The routing losses in training, whatever output flags the caller passes; 0 in evaluation."""
        if not (self.training and routings):
            return 0.0
        time = hidden.shape[1]
        return routing_loss(routings, torch.ones_like(hidden[..., 0]) if mask is None else mask[:, -time:])
