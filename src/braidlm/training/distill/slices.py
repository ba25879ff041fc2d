"""A loss of many logits in the memory of few: slice by slice, each with its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Evaluator = Callable[..., Tensor]
"""The loss of some rows of a pass, given which rows they are and the head's inputs there."""
MAX_LOGITS = 1 << 25
"""Of one slice: 128 MB in float32 for each model."""


def slices_of(rows: int, length: int, vocab_size: int, max_logits: int = MAX_LOGITS) -> list[slice]:
    """Whole sequences, as many at a time as have at most `max_logits` logits, and at least one."""
    size = max(1, max_logits // (length * vocab_size))
    return [slice(begin, begin + size) for begin in range(0, rows, size)]


@torch.compiler.disable  # it asks autograd for gradients
def sliced_loss(
    evaluate: Evaluator, inputs: Sequence[Tensor], slices: Sequence[slice], parameters: Sequence[Tensor]
) -> Tensor:
    """The sum of `evaluate` over all slices of the inputs; `parameters` are those that it uses and that are trained.

    Autograd alone would keep the logits of every slice for the backward pass.
    """
    if not torch.is_grad_enabled():
        return torch.stack([evaluate(part, *(x[part] for x in inputs)) for part in slices]).sum()
    loss: Tensor = _SlicedLoss.apply(evaluate, slices, len(inputs), *inputs, *parameters)
    return loss


class _SlicedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, while a slice's logits are there."""

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluator, slices: Sequence[slice], count: int, *tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[:count], tensors[count:]
        of_inputs = [torch.empty_like(x) for x in inputs]
        of_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        losses = []
        for part in slices:
            with torch.enable_grad():
                rows = [x[part].detach().requires_grad_() for x in inputs]
                loss = evaluate(part, *rows)
            gradients = torch.autograd.grad(loss, [*rows, *parameters], allow_unused=True)
            for whole, gradient in zip(of_inputs, gradients[:count], strict=True):
                whole[part] = gradient
            for total, gradient in zip(of_parameters, gradients[count:], strict=True):
                if gradient is not None:  # a head may have parameters that its logits do not depend on
                    total += gradient
            losses.append(loss.detach())
        ctx.save_for_backward(*of_inputs, *of_parameters)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * upstream for gradient in ctx.saved_tensors)
