"""The losses of a model in a plain pass, as a reference for lowered passes and for the training step."""

from torch import Tensor

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.routing import Routings
from braidlm.training.step.objective import routing_loss_of


def plain_losses(
    model: BraidForCausalLM, inputs: Tensor, labels: Tensor, count: Tensor | float | None = None
) -> tuple[Tensor, Tensor | None, Routings]:
    """The loss of labels at the position predicting them, what routers add to it, and their routings."""
    hidden, routings, read = model.run(inputs)
    text = model.head.loss(hidden, labels, count, **read)
    return text, routing_loss_of(routings, labels, count), routings
