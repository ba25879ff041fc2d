"""Attention experts: a bank of attentions of one shape, of which each token is served by a few."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..routing.compute import is_sparse
from ..routing.dispatch import sort_by_expert
from ..routing.experts import check_stackable, set_active_share
from ..routing.router import TopKRouter
from ..routing.routing import Routing, Routings
from ..routing.stacked import stack_kwargs, weighted_sum
from ..span import Span
from .softmax import AttentionExpertsConfig, attentions


def attention_part(choice: Choice, width: int, dropout: float, stack: int | None) -> nn.Module:
    """An attention, or a bank of them with its router."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return attentions.build(choice, width, dropout=dropout, **stack_kwargs(stack))  # type: ignore[no-any-return]
    check_stackable(attentions, choice)
    return RoutedAttention(choice, experts, width, dropout)


class RoutedAttention(nn.Module):
    """Each token's weighted sum of its few attentions. They and their router read the normalised stream."""

    def __init__(self, choice: Choice, config: AttentionExpertsConfig, width: int, dropout: float):
        super().__init__()
        self.config, self.compute, self.scope = choice.options, config.router.compute, config.scope
        names = config.expert_names
        self.router = TopKRouter(config.router, width, names)
        self.bank = attentions.build(choice, width, dropout=dropout, stack=len(names))
        set_active_attention_share(self.bank, config.router.top_k / len(names), self.scope)

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        attend = self._sparse if is_sparse(self.compute, normed) else self._dense
        return attend(normed, routing, span_for_scope(routing, span, self.scope)), (routing,)

    def _sparse(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.router.choices))
        read = normed[None] if self.scope == "all" else permutation.gather(normed.flatten(0, 1))
        rows = self.bank.forward_routed(read, permutation, span)
        return permutation.combine(rows, routing.weights_BTK.flatten(0, 1)).view_as(normed)

    def _dense(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        return weighted_sum(self.bank(normed[None], span)[0], routing)


def span_for_scope(routing: Routing, span: Span, scope: str) -> Span:
    """The pass as the members of a stack see it: with every token, or only with the tokens that chose them."""
    if scope == "all":
        return span
    chosen_BTN = torch.zeros_like(routing.probabilities_BTN, dtype=torch.bool).scatter(-1, routing.chosen_BTK, True)
    return replace(span, present=chosen_BTN.permute(2, 0, 1))


def set_active_attention_share(attention: Any, share: float, scope: str) -> None:
    """Like `set_active_share`; keys and values are computed for every token where every token is read."""
    set_active_share(attention, share)
    attention.query_share = share
    if scope == "all":
        queries = attention.heads / (attention.heads + 2 * attention.kv_heads)
        attention.qkv.product_share = share * queries + (1 - queries)
