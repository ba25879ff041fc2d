"""Attention experts: a bank of attentions of one shape, of which a router chooses a few for each token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..dropout import Dropout
from ..errors import BraidError
from ..routing.dispatch import Permutation
from ..routing.router import RoutedExperts, TopKRouter, check_stackable, set_active_share
from ..routing.routing import Routing, Routings
from ..routing.stacked import StackedLinear, stack_kwargs
from ..span import Span
from .attention import AttentionExpertsConfig, AttentionHeads, attentions


def attention_part(
    choice: Choice, width: int, dropout: float, stack: int | None, members: Sequence[str] = ()
) -> nn.Module:
    """An attention, or a bank of them with its router; or a stack of either, for these members."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return attentions.build(choice, width, dropout=dropout, **stack_kwargs(stack))  # type: ignore[no-any-return]
    bank = RoutedAttention if experts.keys == "own" else MixtureOfHeads
    if stack is None:
        return bank(choice, experts, width, dropout)
    return MemberAttentionExperts({member: bank(choice, experts, width, dropout) for member in members})


class RoutedAttention(RoutedExperts, nn.Module):
    """The weighted sum of the attentions chosen for each token. They and the router read the normalised stream."""

    def __init__(self, choice: Choice, config: AttentionExpertsConfig, width: int, dropout: float):
        super().__init__()
        check_stackable(attentions, choice)
        self.config, self.compute, self.scope = choice.options, config.router.compute, config.scope
        self.router = TopKRouter(config.router, width, config.expert_names)
        self.bank = attentions.build(choice, width, dropout=dropout, stack=len(self.router.choices))
        self.drop_output = Dropout(kind="expert_outputs")
        set_active_attention_share(self.bank, config.active_share, self.scope)

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        # The rows of experts that attend to all tokens do not know which of these pass by.
        may_be_sparse = not span.needs_weights and span.present is None
        return self.mixed(normed, routing, may_be_sparse, span_for_scope(routing, span, self.scope)), (routing,)

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        inputs = normed[None] if self.scope == "all" else permutation.gather(normed.flatten(0, 1))
        return self.bank.forward_routed(inputs, permutation, *others)  # type: ignore[no-any-return]

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        return self.bank(normed[None], *others)[0]  # type: ignore[no-any-return]


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

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        found = [bank(own, span) for bank, own in zip(self.values(), normed, strict=True)]
        return torch.stack([output for output, _ in found]), sum((routings for _, routings in found), ())


class MixtureOfHeads(RoutedExperts, AttentionHeads):
    """Attention experts with queries and outputs of their own, and shared keys and values (ModuleFormer).

    One routing decision serves a token's query and its output. All queries of a token attend to the same keys, as the
    heads of grouped-query attention do, so a token costs as much as its chosen experts do.
    """

    def __init__(self, choice: Choice, experts: AttentionExpertsConfig, width: int, dropout: float):
        config: Any = choice.options
        super().__init__(config, width, rule_of(choice), dropout)
        if not config.out_projection:
            raise BraidError("experts that share keys differ in their output projection: out_projection must be true")
        kv_width = self.kv_heads * self.head_dim
        if experts.keys == "stream" and kv_width != width:
            raise BraidError(f"keys 'stream' needs kv_heads * head_dim ({kv_width}) equal to the width ({width})")
        self.compute, names = experts.router.compute, experts.expert_names
        self.router = TopKRouter(experts.router, width, names)
        self.queries = StackedLinear(len(names), width, self.inner, config.bias)
        kv_bias = config.bias if experts.kv_bias is None else experts.kv_bias
        self.keys_values = nn.Linear(width, 2 * kv_width, bias=kv_bias) if experts.keys == "shared" else None
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.out = StackedLinear(len(names), self.inner, width, out_bias)
        self.drop_output = Dropout(kind="expert_outputs")
        self.copies, self.query_share = len(names), experts.active_share
        for bank in (self.queries, self.out):
            set_active_share(bank, self.query_share)
        self.cache_shape = (self.kv_heads, self.head_dim)  # number and size of the heads in a cache

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        # Another library's layer has as many queries for every token: those of all experts.
        may_be_sparse = not span.needs_weights and span.backend is None
        return self.mixed(normed, routing, may_be_sparse, span), (routing,)

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        queries = self.queries(permutation.gather(normed.flatten(0, 1)), permutation.groups)
        heads_BTKW = self._attend(permutation.by_token(queries).unflatten(0, normed.shape[:2]), normed, *others)
        return self.out(permutation.as_rows(heads_BTKW.flatten(0, 1)), permutation.groups)  # type: ignore[no-any-return]

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        heads_BTEW = self._attend(self.queries(normed[None]).permute(1, 2, 0, 3), normed, *others)
        return self.out(heads_BTEW.permute(2, 0, 1, 3))  # type: ignore[no-any-return]

    def _attend(self, queries_BTEW: Tensor, normed: Tensor, span: Span) -> Tensor:
        """Attention of several experts' queries for each token, [batch, time, expert, channels] in and out."""
        kv = torch.cat((normed, normed), dim=-1) if self.keys_values is None else self.keys_values(normed)
        key, value = kv.unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(2)
        # Heads that share a key follow one another: all experts' heads of one key head, then those of the next.
        by_key = queries_BTEW.unflatten(-1, (self.kv_heads, -1, self.head_dim))  # [B, T, E, kv head, head, dim]
        query = by_key.transpose(2, 3).flatten(2, 4)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output = self.cached(query, key, value, span).transpose(1, 2)
        return output.unflatten(2, (self.kv_heads, queries_BTEW.shape[2], -1)).transpose(2, 3).flatten(3)


def rule_of(choice: Choice) -> Any:
    """The rule of a kind of attention; that of another package may have none that can be taken out of it."""
    find = getattr(attentions[choice.kind], "rule_of", None)
    if find is None:
        raise BraidError(f"attention '{choice.kind}' cannot share keys among experts")
    return find(choice.options)
