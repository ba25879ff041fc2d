"""Attention experts: a bank of attentions of one shape, of which a router chooses a few for each token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..dropout import Dropout
from ..routing.dispatch import is_sparse, sort_by_expert
from ..routing.router import TopKRouter, check_stackable, set_active_share
from ..routing.routing import Routing, Routings
from ..routing.stacked import stack_kwargs, weighted_sum
from ..span import Span
from .attention import AttentionExpertsConfig, attentions
from .mixture_of_heads import MixtureOfHeads


def attention_part(
    choice: Choice, width: int, dropout: float, stack: int | None, members: Sequence[str] = ()
) -> nn.Module:
    """An attention, or a bank of them with its router; or a stack of either, for these members."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return attentions.build(choice, width, dropout=dropout, **stack_kwargs(stack))  # type: ignore[no-any-return]
    if stack is not None:
        return MemberAttentionExperts(choice, experts, width, dropout, members)
    return attention_bank(choice, experts, width, dropout)


def attention_bank(choice: Choice, experts: AttentionExpertsConfig, width: int, dropout: float) -> nn.Module:
    """A bank of attentions with its router."""
    bank = RoutedAttention if experts.keys == "own" else MixtureOfHeads
    return bank(choice, experts, width, dropout)


class RoutedAttention(nn.Module):
    """The weighted sum of the attentions chosen for each token. They and the router read the normalised stream."""

    def __init__(self, choice: Choice, config: AttentionExpertsConfig, width: int, dropout: float):
        super().__init__()
        check_stackable(attentions, choice)
        self.config, self.compute, self.scope = choice.options, config.router.compute, config.scope
        names = config.expert_names
        self.router = TopKRouter(config.router, width, names)
        self.bank = attentions.build(choice, width, dropout=dropout, stack=len(names))
        self.drop = Dropout(kind="expert_outputs")
        set_active_attention_share(self.bank, config.router.top_k / len(names), self.scope)

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        # The rows of experts that attend to all tokens do not know which of these pass by.
        sparse = is_sparse(self.compute, normed) and not span.needs_weights and span.present is None
        attend = self._sparse if sparse else self._dense
        return attend(normed, routing, span_for_scope(routing, span, self.scope)), (routing,)

    def _sparse(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.router.choices))
        inputs = normed[None] if self.scope == "all" else permutation.gather(normed.flatten(0, 1))
        rows = self.bank.forward_routed(inputs, permutation, span)
        return permutation.combine(self.drop(rows), routing.weights_BTK.flatten(0, 1)).view_as(normed)

    def _dense(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        return weighted_sum(self.drop(self.expert_outputs(normed, span)), routing)

    def expert_outputs(self, normed: Tensor, span: Span) -> Tensor:
        """What every expert makes of every token, [expert, batch, time, width]."""
        return self.bank(normed[None], span)[0]  # type: ignore[no-any-return]


def span_for_scope(routing: Routing, span: Span, scope: str) -> Span:
    """The span for the members of a stack, which attend to all tokens or only to those that chose them."""
    if scope == "all":
        return span
    present = routing.takers_NBT
    return replace(span, present=present if span.present is None else present & span.present)


def set_active_attention_share(attention: Any, share: float, scope: str) -> None:
    """Set the active share of an attention; with scope 'all', keys and values are computed for every token."""
    set_active_share(attention, share)
    attention.query_share = share
    if scope == "all":
        queries = attention.heads / (attention.heads + 2 * attention.kv_heads)
        attention.qkv.product_share = share * queries + (1 - queries)


class MemberAttentionExperts(nn.ModuleDict):
    """A bank with its router for each member, by its name: [member, batch, time, width] in and out.

    Keys and caches are each member's own, so that the banks are computed one after another.
    """

    def __init__(
        self, choice: Choice, experts: AttentionExpertsConfig, width: int, dropout: float, members: Sequence[str]
    ):
        super().__init__({member: attention_bank(choice, experts, width, dropout) for member in members})

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        outputs: list[Tensor] = []
        routings: Routings = ()
        for bank, own in zip(self.values(), normed, strict=True):
            output, bank_routings = bank(own, span)
            outputs.append(output)
            routings += bank_routings
        return torch.stack(outputs), routings
