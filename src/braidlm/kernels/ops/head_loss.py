"""Head and loss in one: scores become their own gradient where they stand, and so cross memory as rarely as can be.

The reference is `losses.next_token_loss` on the head's output; autograd would keep scores and probabilities and make a
third tensor of that size for the gradient.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.ops.linear import product, side_if_small
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side

to_gradient_cuda_: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None = None
with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.cross_entropy import scale_cuda_, to_gradient_cuda_


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count.

    The product is computed in the type of `hidden`; the weight may be wider, and so is its gradient then. `copy` is
    the weight in the type of `hidden`, if it is already there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        copy: Tensor | None,
        labels: Tensor,
        count: Tensor,
        ignored: int,
        tied: DeferredGradient | None,
    ) -> Tensor:
        ctx.wide, ctx.side, ctx.tied = weight.dtype, current_side_stream(), tied
        copy = weight.to(hidden.dtype) if copy is None else copy
        logits = tuned_product(hidden, copy, transposed=True)
        ctx.by_kernel = to_gradient_cuda_ is not None and logits.is_cuda
        if to_gradient_cuda_ is not None and logits.is_cuda:
            loss = to_gradient_cuda_(logits, labels, count, ignored).sum()
        else:
            loss = to_gradient_(logits, labels, ignored).sum() / count
        ctx.save_for_backward(logits, hidden, copy, count)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, weight, count = ctx.saved_tensors
        scale_, factor = (scale_cuda_, upstream) if ctx.by_kernel else (Tensor.mul_, upstream / count)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_gradient = None
        if needs_weight:
            side = side_if_small(ctx.side, hidden)
            with on_side(side, gradient, hidden, factor):  # nobody holds the result: autograd would copy it, too soon
                weight_gradient = scale_(product(gradient.t(), hidden, ctx.wide), factor)
            if ctx.tied is not None:
                ctx.tied.write(weight_gradient, side)
                weight_gradient = None
        hidden_gradient = scale_(tuned_product(gradient, weight), factor) if needs_hidden else None
        return hidden_gradient, weight_gradient, *[None] * 5


def to_gradient_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], which become the gradient of their sum."""
    counted = labels != ignored
    targets = torch.where(counted, labels, 0)[:, None]
    target_scores = logits.gather(1, targets)
    highest = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=logits)
    # The highest score's probability is never too small for its logarithm.
    log_total = highest - logits.amax(-1, keepdim=True).log()
    logits.scatter_add_(1, targets, torch.full_like(target_scores, -1.0))
    if logits.is_cuda or not bool(counted.all()):  # asking a GPU would wait for it
        logits.masked_fill_(~counted[:, None], 0.0)
    return torch.where(counted, (log_total - target_scores)[:, 0], 0.0)
