"""The loss of a linear head in less memory: in training the logits are overwritten by their gradient.

A GPU needs it too, in passes that are not lowered.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.replacing import replaces
from braidlm.model.heads.ends import LinearHead
from braidlm.model.heads.losses import IGNORED
from braidlm.model.routing.dispatch import compute_dtype


@replaces(LinearHead, on=("cpu", "cuda"))
class LeanLinearHead(LinearHead):
    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        # Without gradients this saves no memory, and evaluation should give exactly the reference's numbers.
        if logits is not None or not torch.is_grad_enabled() or self.bias is not None:
            return super().loss(hidden, targets, count, logits)
        total = (targets != IGNORED).sum() if count is None else count
        total = torch.as_tensor(total, dtype=torch.float32, device=hidden.device)
        return _head_loss(hidden.flatten(0, -2).to(compute_dtype(hidden)), self.weight, targets.flatten(), total)


@torch.compiler.disable  # eager was faster than traced in a trial (LOG.md)
def _head_loss(rows: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return HeadLoss.apply(rows, weight, labels, count)


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count.

    The logits are overwritten by their gradient: autograd would keep logits and probabilities and allocate a third
    tensor of that size. The product is computed in the type of `hidden`; the weight may be wider. The reference is
    `next_token_loss` of the head's output.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        cast = weight.to(hidden.dtype)
        logits = hidden @ cast.t()
        losses = logits_to_gradient_(logits, labels)
        ctx.save_for_backward(logits, hidden, cast, count)
        ctx.weight_dtype = weight.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, cast, count = ctx.saved_tensors
        factor, (needs_hidden, needs_weight) = upstream / count, ctx.needs_input_grad[:2]
        hidden_gradient = (gradient @ cast).mul_(factor) if needs_hidden else None
        weight_gradient = (gradient.t() @ hidden).to(ctx.weight_dtype).mul_(factor) if needs_weight else None
        return hidden_gradient, weight_gradient, None, None


def logits_to_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses [rows] of logits [rows, vocabulary], and overwrite the logits by the gradient of their sum."""
    trained = labels != IGNORED
    targets = torch.where(trained, labels, 0)[:, None]
    target_logits = logits.gather(1, targets)
    max_logits = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=logits)
    # The largest probability never underflows, so that its logarithm is finite.
    log_sum_exp = max_logits - logits.amax(-1, keepdim=True).log()
    logits.scatter_add_(1, targets, torch.full_like(target_logits, -1.0))
    if logits.is_cuda or not bool(trained.all()):  # on a GPU this test would wait for the device
        logits.masked_fill_(~trained[:, None], 0.0)
    return torch.where(trained, (log_sum_exp - target_logits)[:, 0], 0.0)
