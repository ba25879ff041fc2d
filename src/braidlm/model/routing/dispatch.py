"""Sparse dispatch: tokens are sorted by expert, multiplied by their experts' matrices and summed with their weights.

The reference computes every expert on every token and gives weight 0 to those not chosen (compute `dense`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exporting import is_exporting, is_recorded


def compute_dtype(values: Tensor) -> torch.dtype:
    """The type of products with these values: autocast's where it is on, or their own."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""The types that torch's grouped product supports; its strides must be multiples of 16 bytes."""

Compute = Literal["measured", "sparse", "dense"]
"""Whether only the chosen experts are computed, or all and those not chosen weighted by 0: the results are equal.

Which is faster depends on shapes and device; training measures it once before its first step.
A forward pass never measures, so that it rounds the same in every process.
"""
MIN_SPARSE_TOKENS = 64  # with fewer tokens, sorting costs more than it saves: the rule where nothing was measured


def is_sparse(compute: Compute, hidden: Tensor) -> bool:
    """Whether only the chosen experts are computed for a stream [..., width]."""
    recorded = is_recorded(hidden)
    if recorded and hidden.is_cuda and compute_dtype(hidden) != torch.bfloat16:
        return False  # torch records its grouped product in bfloat16 only
    if is_exporting():
        return False  # how many tokens an expert gets would be a shape of the graph
    if compute != "measured":
        return compute == "sparse"
    if recorded:
        return False  # sparse computation reads each expert's number of tokens from the device
    return hidden.numel() // hidden.shape[-1] >= MIN_SPARSE_TOKENS


@dataclass(frozen=True)
class Groups:
    """Rows sorted by the expert they go to."""

    counts_E: Tensor  # the number of rows of each expert

    @property
    def ends_E(self) -> Tensor:
        """Where each expert's rows end: the `offs` of torch's grouped product."""
        return self.counts_E.cumsum(0).to(torch.int32)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each expert's rows; on a GPU this waits for the device."""
        return rows.split(self.counts_E.tolist())

    def repeat(self, vectors_EW: Tensor, rows: Tensor) -> Tensor:
        """The vector of each row's expert."""
        return torch.repeat_interleave(vectors_EW, self.counts_E, dim=0, output_size=len(rows))


@dataclass(frozen=True)
class Permutation:
    """Moves tokens to rows sorted by expert, one for each token and chosen expert, and back."""

    groups: Groups
    source_R: Tensor  # the token of each row
    expert_R: Tensor  # the expert of each row
    row_TK: Tensor  # the rows of each token

    def gather(self, tokens_TW: Tensor) -> Tensor:
        """The token of each row, [R, W]."""
        return tokens_TW.index_select(0, self.source_R)

    def gather_per_expert(self, tokens_ETW: Tensor) -> Tensor:
        """The token of each row [R, W], from values per expert; [1, T, W] if they are the same for every expert."""
        if len(tokens_ETW) == 1:
            return self.gather(tokens_ETW[0])
        return tokens_ETW.flatten(0, 1).index_select(0, self._index_R(tokens_ETW.shape[1]))

    def scatter_per_expert(self, rows: Tensor) -> Tensor:
        """The inverse of `gather_per_expert`, [E, T, W], with zeros where a token did not choose the expert."""
        experts, tokens = len(self.groups.counts_E), len(self.row_TK)
        zeros = rows.new_zeros(experts * tokens, rows.shape[1])
        return zeros.index_copy(0, self._index_R(tokens), rows).unflatten(0, (experts, tokens))

    def by_token(self, rows: Tensor) -> Tensor:
        """Each token's rows, [T, K, W]."""
        return rows.index_select(0, self.row_TK.flatten()).unflatten(0, self.row_TK.shape)

    def as_rows(self, values_TKW: Tensor) -> Tensor:
        """The inverse of `by_token`."""
        rows = torch.empty_like(values_TKW).flatten(0, 1)
        return rows.index_copy(0, self.row_TK.flatten(), values_TKW.flatten(0, 1))

    def combine(self, rows: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's rows."""
        top_k = self.row_TK.shape[1]
        rows_TKW = self.by_token(rows)
        weights = weights_TK.to(rows.dtype)[:, :, None]
        total = rows_TKW[:, 0] * weights[:, 0]
        for choice in range(1, top_k):
            total = torch.addcmul(total, rows_TKW[:, choice], weights[:, choice])
        return total

    def _index_R(self, tokens: int) -> Tensor:
        return self.expert_R * tokens + self.source_R


def sort_by_expert(chosen_TK: Tensor, experts: int) -> Permutation:
    """The permutation that sorts by expert and, within an expert, by token."""
    expert_R, order = chosen_TK.flatten().sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=chosen_TK.device)
    counts = counts.scatter_add(0, expert_R, torch.ones_like(expert_R))
    row = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return Permutation(Groups(counts), order // chosen_TK.shape[1], expert_R, row.view_as(chosen_TK))


def grouped_product(rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, groups: Groups) -> Tensor:
    """Multiply sorted rows [R, in] by their experts' matrices: on a GPU by one grouped product, which does not wait for
    the device; on a CPU by one product per expert."""
    dtype = compute_dtype(rows)
    if rows.is_cuda and supports_grouped_mm(weight_EIO, dtype):
        outputs = F.grouped_mm(rows.to(dtype), weight_EIO.to(dtype), offs=groups.ends_E)
        return outputs if bias_EO is None else outputs + groups.repeat(bias_EO, rows).to(outputs.dtype)
    if bias_EO is None:
        return torch.cat([own_rows @ weight for own_rows, weight in zip(groups.split(rows), weight_EIO, strict=True)])
    triples = zip(bias_EO, groups.split(rows), weight_EIO, strict=True)
    return torch.cat([torch.addmm(bias, own_rows, weight) for bias, own_rows, weight in triples])


def supports_grouped_mm(weight_EIO: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product supports matrices of this shape and type."""
    return dtype in GROUPED and all(size * dtype.itemsize % 16 == 0 for size in weight_EIO.shape[1:])
