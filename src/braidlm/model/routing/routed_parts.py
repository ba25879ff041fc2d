"""Experts inside a block: banks of attentions or feed-forward parts, of which each token is served by a few.

Parts read the normalised stream, and so do their routers; the block adds what comes out to the stream.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.softmax import AttentionExpertsConfig, attentions
from ..config.registry import Choice, Registry
from ..errors import BraidError
from ..feed.feeds import FeedExpertsConfig, feeds
from ..span import Span
from .dispatch import place
from .experts import count_share
from .router import TopKRouter
from .routing import Routing, Routings
from .ways import faster_way


def feed_part(choice: Choice, width: int, stack: int | None) -> nn.Module:
    """A feed-forward part, or a bank of them with its router."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return feeds.build(choice, width, **_stacked(stack))  # type: ignore[no-any-return]
    _check_stackable(feeds, choice)
    return RoutedFeed(choice, experts, width)


def attention_part(choice: Choice, width: int, dropout: float, stack: int | None) -> nn.Module:
    """An attention, or a bank of them with its router."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return attentions.build(choice, width, dropout=dropout, **_stacked(stack))  # type: ignore[no-any-return]
    _check_stackable(attentions, choice)
    return RoutedAttention(choice, experts, width, dropout)


class RoutedFeed(nn.Module):
    """Each token's weighted sum of its few feed-forward parts, and of the shared one if there is one."""

    def __init__(self, choice: Choice, config: FeedExpertsConfig, width: int):
        super().__init__()
        names, self.compute = config.listed, config.router.compute
        self.router = TopKRouter(config.router, width, names)
        self.bank = feeds.build(choice, width, stack=len(names))
        count_share(self.bank, config.router.top_k / len(names))
        self.shared: nn.Module | None = None
        if config.shared is not None:
            self.shared = feeds.build(Choice(choice.kind, replace(choice.options, hidden=config.shared)), width)

    def forward(self, normed: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        experts, top_k = len(self.router.choices), routing.chosen_BTK.shape[-1]

        def sparse(normed: Tensor, routing: Routing) -> Tensor:
            placed = place(routing.chosen_BTK.flatten(0, 1), experts)
            rows = placed.gather(normed.flatten(0, 1))
            fed, _ = self.bank(rows, placed.groups)
            return placed.combine(fed, routing.weights_BTK.flatten(0, 1)).view_as(normed)

        def dense(normed: Tensor, routing: Routing) -> Tensor:
            return weighted(self.bank(normed[None])[0], routing)

        way = faster_way(self.compute, self.bank, (top_k,), normed, routing, sparse, dense)
        made = (sparse if way == "sparse" else dense)(normed, routing)
        return (made if self.shared is None else made + self.shared(normed)[0]), (routing,)


class RoutedAttention(nn.Module):
    """Each token's weighted sum of its few attentions."""

    def __init__(self, choice: Choice, config: AttentionExpertsConfig, width: int, dropout: float):
        super().__init__()
        names, self.compute, self.scope = config.listed, config.router.compute, config.scope
        self.router = TopKRouter(config.router, width, names)
        self.bank = attentions.build(choice, width, dropout=dropout, stack=len(names))
        count_attention_share(self.bank, config.router.top_k / len(names), self.scope)

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        experts, top_k = len(self.router.choices), routing.chosen_BTK.shape[-1]

        def sparse(normed: Tensor, routing: Routing, span: Span) -> Tensor:
            placed = place(routing.chosen_BTK.flatten(0, 1), experts)
            read = normed[None] if self.scope == "all" else placed.gather(normed.flatten(0, 1))
            rows = self.bank.routed(read, placed, seen(routing, span, self.scope))
            return placed.combine(rows, routing.weights_BTK.flatten(0, 1)).view_as(normed)

        def dense(normed: Tensor, routing: Routing, span: Span) -> Tensor:
            return weighted(self.bank(normed[None], seen(routing, span, self.scope))[0], routing)

        trials = partial(sparse, span=span.bare()), partial(dense, span=span.bare())
        way = faster_way(self.compute, self.bank, (top_k, self.scope, span.time), normed, routing, *trials)
        return (sparse if way == "sparse" else dense)(normed, routing, span), (routing,)


def weighted(every_EBTW: Tensor, routing: Routing) -> Tensor:
    """What all members of a stack made of every token, weighted by the routing: 0 for those not chosen."""
    return torch.einsum("ebtw,bte->btw", every_EBTW, routing.weights_BTN.to(every_EBTW.dtype))


def seen(routing: Routing, span: Span, scope: str) -> Span:
    """The pass as members of a stack see it: with every token, or with those that chose them."""
    if scope == "all":
        return span
    chosen_BTN = torch.zeros_like(routing.probabilities_BTN, dtype=torch.bool).scatter(-1, routing.chosen_BTK, True)
    return replace(span, present=chosen_BTN.permute(2, 0, 1))


def count_attention_share(attention: Any, share: float, scope: str) -> None:
    """Like `count_share`; keys and values are computed for every token where every token is read."""
    count_share(attention, share)
    attention.query_share = share
    if scope == "all":
        queries = attention.heads / (attention.heads + 2 * attention.kv_heads)
        attention.qkv.product_share = share * queries + (1 - queries)


def _stacked(stack: int | None) -> dict[str, int]:
    return {} if stack is None else {"stack": stack}


def _check_stackable(registry: Registry, choice: Choice) -> None:
    if not getattr(registry[choice.kind], "stackable", False):
        raise BraidError(f"{registry.noun} '{choice.kind}' cannot be one of several experts")
