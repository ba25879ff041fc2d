"""Muon as torch.optim.Muon computes it, but for all matrices of one shape at once, and for banks of matrices.

One after another the small matrices of a small model would leave a GPU idle. A parameter [rows, columns] is a matrix,
and a bank [member, inputs, outputs] a matrix for each member.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, as in torch: it brings singular values near 1 in few steps, but not to it."""
SMALLEST_NORM = 1e-7


class Batch(NamedTuple):
    """What matrices have in common that are computed together."""

    rows: int
    columns: int
    lr_ratio: float
    """The factor of the learning rate."""


class BatchedMuon(optim.Optimizer):
    """The options are those of torch.optim.Muon; a learning rate that is a tensor stays on the device."""

    state_keys = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
    ):
        """`dtype` is that of the products; the momentum and the weights keep their own."""
        self.dtype = dtype
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**options, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; nothing waits for the device."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for batch, parameters in in_batches(trained, group["adjust_lr_fn"]).items():
                self._update(batch, parameters, group)

    def _update(self, batch: Batch, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        gradients: list[Any] = [p.grad for p in parameters]
        averages = [self._momentum_buffer(p) for p in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, averages, momentum) if group["nesterov"] else averages
        matrices = torch.cat([each.reshape(-1, batch.rows, batch.columns) for each in directions])
        steps = orthogonalized(matrices.to(self.dtype), group["ns_steps"])
        steps = steps.to(torch.float32, memory_format=torch.contiguous_format).mul_(-rate * batch.lr_ratio)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, _split_like(steps, parameters))

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return state["momentum_buffer"]


def in_batches(parameters: Iterable[Tensor], adjust_lr_fn: str) -> dict[Batch, list[Tensor]]:
    """The parameters by the shape of their matrices and the ratio of their learning rate, in order."""
    batches: dict[Batch, list[Tensor]] = {}
    for parameter in parameters:
        rows, columns = parameter.shape[-2:]
        batches.setdefault(Batch(rows, columns, lr_ratio(parameter, adjust_lr_fn)), []).append(parameter)
    return batches


def lr_ratio(parameter: Tensor, adjust_lr_fn: str) -> float:
    """The factor of the learning rate for the matrices of a parameter."""
    rows, columns = parameter.shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))  # steps of the size that AdamW's have
    outputs, inputs = (columns, rows) if parameter.ndim == 3 else (rows, columns)
    return math.sqrt(max(1, outputs / inputs))


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Matrices [matrix, row, column] with their singular values brought near 1, by Newton-Schulz iterations."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _split_like(stacked: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The matrices of each parameter, in its shape."""
    counts = [p.numel() // stacked[0].numel() for p in parameters]
    return [each.view_as(p) for each, p in zip(stacked.split(counts), parameters, strict=True)]
