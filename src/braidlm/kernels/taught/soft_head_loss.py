"""A head's loss with soft targets: as `HeadLoss`, a weighted sum of the text's loss and the teachers' divergence."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.head_loss import head_gradients
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream
from braidlm.kernels.taught.soft_targets import SoftTargets, TaughtLosses, TeacherLogits
from braidlm.kernels.taught.teacher_gradient import teachers_to_gradient_
from braidlm.kernels.taught.top_tokens_gradient import top_tokens_to_gradient_


class SoftHeadLoss(torch.autograd.Function):
    """As `HeadLoss`, with soft targets: a weighted sum of losses, and both without their weights or gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cast: Tensor | None,
        labels: Tensor,
        count: Tensor,
        ignored: int,
        tied: DeferredGradient | None,
        soft: SoftTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.weight_dtype, ctx.side, ctx.tied = weight.dtype, current_side_stream(), tied
        ctx.set_materialize_grads(False)
        cast = weight.to(hidden.dtype) if cast is None else cast
        logits = tuned_product(hidden, cast, transposed=True)
        if isinstance(soft, TeacherLogits):
            losses, divergences = teachers_to_gradient_(logits, labels, count, soft, ignored)
        else:
            losses, divergences = top_tokens_to_gradient_(logits, labels, count, soft, ignored)
        ctx.save_for_backward(logits, hidden, cast)
        text, divergence = losses.sum(), divergences.sum()
        ctx.mark_non_differentiable(text, divergence)
        return soft.text_weight * text + soft.weight * divergence, text, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return *head_gradients(ctx, upstream), *[None] * 6


def taught_head_loss(soft: SoftTargets, *arguments: Any) -> TaughtLosses:
    """`SoftHeadLoss` of the arguments of `HeadLoss`."""
    return TaughtLosses(*SoftHeadLoss.apply(*arguments, soft))
