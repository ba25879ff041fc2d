"""Tokens to their experts and back: sort by expert, one product per expert or one for all, weighted sum.

The reference is `dispatch_by_mask`, which runs every expert on every token and hides what was not chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""What torch's grouped product computes; its strides must be multiples of 16 bytes."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by the expert they go to."""

    counts_E: Tensor
    """How many rows each expert has."""

    @property
    def ends_E(self) -> Tensor:
        """Where each expert's rows end, as torch's grouped product wants it."""
        return self.counts_E.cumsum(0).to(torch.int32)


Bank = Callable[[Tensor, Groups], Tensor]
"""Sorted rows [rows, in] to what their experts make of them [rows, out]."""


def dispatch(rows_RW: Tensor, chosen_RK: Tensor, weights_RK: Tensor, experts: int, bank: Bank) -> Tensor:
    """The weighted sum of what each row's experts make of it, computed for the chosen ones only."""
    order = chosen_RK.flatten().argsort(stable=True)
    source = order // chosen_RK.shape[1]
    counts = torch.zeros(experts, dtype=torch.long, device=rows_RW.device)
    counts = counts.scatter_add(0, chosen_RK.flatten(), torch.ones_like(order))
    made = bank(rows_RW[source], Groups(counts))
    weighted = made * weights_RK.flatten()[order][:, None].to(made.dtype)
    return made.new_zeros(len(rows_RW), made.shape[1]).index_add(0, source, weighted)


def dispatch_by_mask(rows_RW: Tensor, chosen_RK: Tensor, weights_RK: Tensor, experts: int, bank: Bank) -> Tensor:
    """The reference: every expert on every row."""
    weights_RE = torch.zeros(len(rows_RW), experts, dtype=weights_RK.dtype, device=rows_RW.device)
    weights_RE = weights_RE.scatter_add(1, chosen_RK, weights_RK)
    total: Tensor | float = 0.0
    for expert in range(experts):
        counts = torch.zeros(experts, dtype=torch.long, device=rows_RW.device)
        counts[expert] = len(rows_RW)
        made = bank(rows_RW, Groups(counts))
        total = total + made * weights_RE[:, expert, None].to(made.dtype)
    assert isinstance(total, Tensor)
    return total


class ExpertLinear(nn.Module):
    """A linear layer of each expert; weight [expert, in, out]."""

    def __init__(self, experts: int, inputs: int, outputs: int, top_k: int, bias: bool = False):
        super().__init__()
        self.stack = experts
        self.active_share = top_k / experts
        """Of its parameters, how many serve a token."""
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        made = _products(rows, self.weight, groups)
        if self.bias is None:
            return made
        owner = torch.repeat_interleave(self.bias, groups.counts_E, dim=0, output_size=len(rows))
        return made + owner.to(made.dtype)

    def extra_repr(self) -> str:
        return f"{self.stack} x {self.weight.shape[1]} -> {self.weight.shape[2]}, bias={self.bias is not None}"


def _products(rows: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """One grouped product on a GPU, which waits for nothing; on a CPU one after another, which is as fast there."""
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    if rows.is_cuda and dtype in GROUPED and _aligned(weight_EIO, dtype):
        return F.grouped_mm(rows.to(dtype), weight_EIO.to(dtype), offs=groups.ends_E)
    pieces = rows.split(groups.counts_E.tolist())
    return torch.cat([piece @ weight for piece, weight in zip(pieces, weight_EIO, strict=True)])


def _aligned(weight_EIO: Tensor, dtype: torch.dtype) -> bool:
    return all(size * dtype.itemsize % 16 == 0 for size in weight_EIO.shape[1:])
