"""Tokens dispatched to experts, as the tests of routed kernels need them."""

import torch
from torch import Tensor

from braidlm.kernels.ops.linear import cast_all
from braidlm.kernels.routed.permutation import Permutation, plain_permute

TILE = 16
CASES = {
    "top 1, an empty expert": (3, 1, 2),
    "all": (3, 3, None),
    "top 2, an empty expert": (4, 2, 0),
    "top 2": (5, 2, None),
}
"""Experts, top k, and the expert that no token chooses."""


def choices(tokens: int, experts: int, top_k: int, device: str, empty: int | None = None) -> Tensor:
    """Different experts for each token, some far more often than others, one perhaps never."""
    preference = torch.linspace(0, 2, experts, device=device)
    if empty is not None:
        preference[empty] = -torch.inf
    scores = torch.randn(tokens, experts, device=device) + preference
    return scores.topk(top_k).indices


def permuted(case: str, device: str) -> tuple[Permutation, Tensor]:
    """A small permutation of a kind, and the choices of its tokens."""
    experts, top_k, empty = CASES[case]
    chosen = choices(22, experts, top_k, device, empty)
    return plain_permute(chosen, experts, 2, TILE), chosen


def matrices(*shape: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A parameter, its cast, and the difference that makes the first equal to the second."""
    weight = torch.randn(*shape, device=device) * shape[-2] ** -0.5
    cast = cast_all([weight], dtype)[weight]
    return weight, cast, cast.double() - weight.double()


def real_rows(permutation: Permutation) -> Tensor:
    """Indices of rows that are no padding; selecting them gives padding a gradient of zeros."""
    return (permutation.source >= 0).nonzero().flatten()


def with_padding(rows: Tensor, permutation: Permutation, gather: bool) -> Tensor:
    """Real rows among padding of some finite number; tokens to be gathered are unchanged."""
    if gather:
        return rows
    return rows.new_full((permutation.rows, rows.shape[1]), 0.7).index_copy(0, real_rows(permutation), rows)
