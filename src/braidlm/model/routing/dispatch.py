"""Tokens to their experts and back: sort by expert, one product per expert or one for all, weighted sum.

The reference is `dispatch_by_mask`, which runs every expert on every token and hides what was not chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..eager_cpu import GroupedLinearFunction

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

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each expert's rows; a GPU is waited for."""
        return rows.split(self.counts_E.tolist())

    def repeat(self, vectors_EW: Tensor, rows: Tensor) -> Tensor:
        """For each row its expert's vector."""
        return torch.repeat_interleave(vectors_EW, self.counts_E, dim=0, output_size=len(rows))


@dataclass(frozen=True)
class Permutation:
    """Rows sorted by expert, one for each token and choice: from tokens to rows and back."""

    groups: Groups
    source_R: Tensor
    """The token of each row."""
    expert_R: Tensor
    """The expert of each row."""
    row_TK: Tensor
    """The row of each token's choices."""

    def gather(self, tokens_TW: Tensor) -> Tensor:
        """Each row's token."""
        return tokens_TW.index_select(0, self.source_R)

    def gather_per_expert(self, every_ETW: Tensor) -> Tensor:
        """Each row out of what is there for every expert and token; [1, T, W] is the same for every expert."""
        if len(every_ETW) == 1:
            return self.gather(every_ETW[0])
        return every_ETW.flatten(0, 1).index_select(0, self._index_R(every_ETW.shape[1]))

    def scatter_per_expert(self, rows: Tensor) -> Tensor:
        """The opposite of `gather_per_expert`, [E, T, W], with zeros where a token did not choose the expert."""
        experts, tokens = len(self.groups.counts_E), len(self.row_TK)
        everywhere = rows.new_zeros(experts * tokens, rows.shape[1])
        return everywhere.index_copy(0, self._index_R(tokens), rows).view(experts, tokens, -1)

    def combine(self, rows: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's rows."""
        tokens, top_k = self.row_TK.shape
        made_TKW = rows.index_select(0, self.row_TK.flatten()).view(tokens, top_k, -1)
        weights = weights_TK.to(rows.dtype)[:, :, None]
        total = made_TKW[:, 0] * weights[:, 0]
        for choice in range(1, top_k):
            total = torch.addcmul(total, made_TKW[:, choice], weights[:, choice])
        return total

    def _index_R(self, tokens: int) -> Tensor:
        return self.expert_R * tokens + self.source_R


def sort_by_expert(chosen_TK: Tensor, experts: int) -> Permutation:
    """The permutation that sorts by expert; inside an expert the rows keep the tokens' order."""
    expert_R, order = chosen_TK.flatten().sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=chosen_TK.device)
    counts = counts.scatter_add(0, expert_R, torch.ones_like(expert_R))
    row = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return Permutation(Groups(counts), order // chosen_TK.shape[1], expert_R, row.view_as(chosen_TK))


Bank = Callable[[Tensor, Groups], Tensor]
"""Sorted rows [rows, in] to what their experts make of them [rows, out]."""


def dispatch(rows_TW: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: int, bank: Bank) -> Tensor:
    """The weighted sum of what each row's experts make of it, computed for the chosen ones only."""
    permutation = sort_by_expert(chosen_TK, experts)
    return permutation.combine(bank(permutation.gather(rows_TW), permutation.groups), weights_TK)


def dispatch_by_mask(rows_TW: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: int, bank: Bank) -> Tensor:
    """The reference: every expert on every row."""
    weights_TE = torch.zeros(len(rows_TW), experts, dtype=weights_TK.dtype, device=rows_TW.device)
    weights_TE = weights_TE.scatter_add(1, chosen_TK, weights_TK)
    total: Tensor | float = 0.0
    for expert in range(experts):
        counts = torch.zeros(experts, dtype=torch.long, device=rows_TW.device)
        counts[expert] = len(rows_TW)
        made = bank(rows_TW, Groups(counts))
        total = total + made * weights_TE[:, expert, None].to(made.dtype)
    assert isinstance(total, Tensor)
    return total


def grouped_product(rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, groups: Groups) -> Tensor:
    """Sorted rows [R, in] through their experts' matrices: one grouped product on a GPU, which waits for nothing; on
    a CPU one product after another, which is as fast there.
    """
    kind = rows.device.type
    narrowed = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if narrowed else rows.dtype
    if rows.is_cuda and supports_grouped_mm(weight_EIO, dtype):
        made = F.grouped_mm(rows.to(dtype), weight_EIO.to(dtype), offs=groups.ends_E)
        return made if bias_EO is None else made + groups.repeat(bias_EO, rows).to(made.dtype)
    if rows.is_cpu and not narrowed and not torch.compiler.is_compiling():
        in_place: Tensor = GroupedLinearFunction.apply(rows, weight_EIO, bias_EO, groups.counts_E.tolist())
        return in_place
    pieces = groups.split(rows)
    if bias_EO is None:
        return torch.cat([piece @ weight for piece, weight in zip(pieces, weight_EIO, strict=True)])
    parts = zip(bias_EO, pieces, weight_EIO, strict=True)
    return torch.cat([torch.addmm(bias, piece, weight) for bias, piece, weight in parts])


def supports_grouped_mm(weight_EIO: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product takes such matrices."""
    return dtype in GROUPED and all(size * dtype.itemsize % 16 == 0 for size in weight_EIO.shape[1:])
