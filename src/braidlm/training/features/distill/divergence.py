"""KL(teachers || model) at a temperature: over the whole vocabulary, or over the teachers' top k and one event more.

A loss of many logits is computed in the memory of few: slice by slice, each with its gradients.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.soft_head_loss import ROUNDING

Evaluator = Callable[..., Tensor]
"""The loss of some rows of a pass, given which rows they are and the head's inputs there."""
MAX_LOGITS = 1 << 25
"""The logits of one slice: 128 MB in float32 for each model."""


def averaged_log_probabilities(logits: Iterable[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
    """The logarithm of the teachers' probabilities [..., vocabulary], averaged by weights that add up to 1.

    Logits that are computed as they are asked for are dropped one by one. They have no gradient.
    """
    scaled = (each if temperature == 1 else each.float() / temperature for each in logits)
    logs = (
        torch.log_softmax(each, -1, dtype=torch.float32).add_(math.log(weight))
        for each, weight in zip(scaled, weights, strict=True)
    )
    return functools.reduce(torch.logaddexp, logs)


def divergence(teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] of log-probabilities [..., vocabulary] of the teachers from a model whose logits may have more entries.

    Entries that the teachers do not have are those of no token: there the teachers' probability is 0.
    """
    own = torch.log_softmax(logits.float() / temperature, -1)[..., : teacher.shape[-1]]
    return _expected_difference(teacher, own).sum(-1)


def top_k_divergence(ids: Tensor, teacher: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL [...] over k tokens `ids` [..., k], whose log-probabilities the teachers gave, and all others as one event.

    It is the divergence of two coarser distributions: at most `divergence`, and equal to it with k = vocabulary.
    """
    scaled = logits.float() / temperature
    total = scaled.logsumexp(-1)
    of_k = _expected_difference(teacher, scaled.gather(-1, ids) - total[..., None]).sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return of_k
    # Not 1 - sum: the model may leave the others less than float32 resolves beside 1.
    others = scaled.scatter(-1, ids, torch.finfo(scaled.dtype).min).logsumexp(-1) - total
    left = 1.0 - teacher.exp().sum(-1)
    left = torch.where(left > ROUNDING, left, 0.0)
    return of_k + _expected_difference(left.log(), others)


def _expected_difference(teacher: Tensor, own: Tensor) -> Tensor:
    """p (log p - log q), 0 where p is."""
    there = teacher > -torch.inf
    difference = torch.where(there, teacher, 0.0) - torch.where(there, own, 0.0)
    return teacher.exp() * difference


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
