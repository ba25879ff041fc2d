"""Mixture of attention heads (ModuleFormer): experts with queries and outputs of their own, and shared keys and values.

One routing decision serves a token's query and its output. All queries of a token attend to the same keys, as the heads
of grouped-query attention do, so a token costs as much as its chosen experts do.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..dropout import Dropout
from ..errors import BraidError
from ..routing.dispatch import is_sparse, sort_by_expert
from ..routing.router import TopKRouter, set_active_share
from ..routing.routing import Routing, Routings
from ..routing.stacked import StackedLinear, weighted_sum
from ..span import Span
from .attention import ABSENT, AttentionExpertsConfig, AttentionHeads, attentions


class MixtureOfHeads(AttentionHeads):
    """The weighted sum of the attentions chosen for each token. They and the router read the normalised stream."""

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
        self.query_share = experts.router.top_k / len(names)
        for bank in (self.queries, self.out):
            set_active_share(bank, self.query_share)

    def forward(self, normed: Tensor, span: Span) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        sparse = is_sparse(self.compute, normed) and not span.needs_weights
        return (self._sparse if sparse else self._dense)(normed, routing, span), (routing,)

    def _sparse(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.router.choices))
        queries = self.queries(permutation.gather(normed.flatten(0, 1)), permutation.groups)
        heads_BTKW = self._attend(permutation.by_token(queries).unflatten(0, normed.shape[:2]), normed, span)
        rows = self.out(permutation.as_rows(heads_BTKW.flatten(0, 1)), permutation.groups)
        return permutation.combine(self.drop_output(rows), routing.weights_BTK.flatten(0, 1)).view_as(normed)

    def _dense(self, normed: Tensor, routing: Routing, span: Span) -> Tensor:
        return weighted_sum(self.drop_output(self.expert_outputs(normed, span)), routing)

    def expert_outputs(self, normed: Tensor, span: Span) -> Tensor:
        """What every expert makes of every token, [expert, batch, time, width]."""
        queries_BTEW = self.queries(normed[None]).permute(1, 2, 0, 3)
        heads_BTEW = self._attend(queries_BTEW, normed, span)
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
        mask = span.masks[self.window]
        if span.present is not None:
            key = key.masked_fill(~span.present[0, :, None, :, None], ABSENT)
        if span.cache is not None:
            key, value = span.cache.update(key, value, self.cache_slot)
        if span.present is not None:
            key, mask = self.mask_absent_keys(key, mask, span)
        output = self.weigh(query, key, value, mask, span).transpose(1, 2)
        return output.unflatten(2, (self.kv_heads, queries_BTEW.shape[2], -1)).transpose(2, 3).flatten(3)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number and size of the heads in a cache."""
        return self.kv_heads, self.head_dim

    def score_flops(self, length: int) -> int:
        """FLOPs per token of attention without the projections, averaged over a sequence of `length`."""
        chosen = round(self.query_share * len(self.router.choices))
        return round(4 * self.inner * chosen * self.pairs(length) / length)


def rule_of(choice: Choice) -> Any:
    """The rule of a kind of attention; that of another package may have none that can be taken out of it."""
    find = getattr(attentions[choice.kind], "rule_of", None)
    if find is None:
        raise BraidError(f"attention '{choice.kind}' cannot share keys among experts")
    return find(choice.options)
