"""Reconstruction: the head recovers each token from its own embedding (super tiny language models)."""

from typing import Any

from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass, extra_losses


@extra_losses.register("reconstruction")
class Reconstruction(ExtraLoss):
    """The head's loss of each input token, read from its embedding: with bytes, the token's spelling."""

    needs_layers = True

    def __init__(self, config: Any, model: BraidForCausalLM):
        super().__init__(config, model)
        width, width_out = model.config.hidden_size, model.model.width_out
        if width != width_out:
            raise BraidError(
                f"the head reads a width of {width_out} and the embedding has {width}: it cannot read an embedding",
                "training.losses",
                "Leave out the loss `reconstruction`, or let the last stage end at the embedding's width.",
            )

    def forward(self, done: TrainingPass) -> Tensor:
        own = done.inputs.masked_fill(done.labels == IGNORED, IGNORED)
        return done.model.head.loss(done.model.model.norm(done.layers[0]), own, done.count)
