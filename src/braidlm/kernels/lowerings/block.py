"""Blocks: attention and feed-forward are served or refused one by one."""

from functools import partial
from typing import Any

from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, combined, with_dropout
from braidlm.kernels.lowerings.lowering import LayerLowering, lowering_of, lowers, unless
from braidlm.model.dropout import Dropout
from braidlm.model.routing.routing import Routings
from braidlm.model.stages import Block

BLOCK = frozenset(
    {"norm", "attention", "feed", "layers", "share", "capacity", "every"}
    | {"dropout.attention", "dropout.residual", "dropout.feed", "dropout.expert_outputs", "dropout.experts"}
)


@lowers(Block)
class BlockLowering(LayerLowering):
    honours = BLOCK
    has_seeds = True
    is_one = False

    def reject(self, part: Block, body: Any) -> str | None:
        return unless(type(part.drop) is Dropout, f"drop is a {type(part.drop).__name__}")

    def sublayers(self, layer: Block) -> list[tuple[str, Any, Any]]:
        return [("attention", layer.attention_norm, layer.attention), ("feed", layer.feed_norm, layer.feed)]

    def run(
        self, stream: Any, pending: PendingAdd | None, layer: Block, context: PassContext
    ) -> tuple[Tensor, PendingAdd | None, Routings]:
        stream, routings = combined(stream), ()
        for use, (kind, norm, part) in enumerate(self.sublayers(layer)):
            sublayer = lowering_of(part).run if part in context.parts else partial(context.plain.sublayer, kind)
            stream, addition, chosen = sublayer(stream, pending, norm, part, context)
            pending = with_dropout(addition, layer, use, context)
            routings += chosen
        return stream, pending, routings
