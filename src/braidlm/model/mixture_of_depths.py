"""Mixture of depths (arXiv 2404.02258): some tokens of a sequence go through a block, and the others pass by it.

In training the tokens with the highest scores enter, a fixed share of each sequence: sizes are known in advance, and
the cost falls with the share. Which these are depends on later tokens too. So a router learns beside it to tell from a
token alone whether it enters, and decides in evaluation and generation.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .attention.attention import ABSENT, AttentionHeads
from .config.ranges import Layers, Probability
from .errors import BraidError
from .exporting import is_recorded
from .routing.dispatch import compute_dtype
from .routing.losses import masked_mean, routing_losses
from .routing.router import RouterConfig, ScoreLinear, TopKRouter
from .routing.routing import Routing, Routings
from .span import Span
from .stages import Block, BlockStage, Stage, share_weights, stage_kinds

DEPTH_CHOICES = ("block", "around")
PREDICTION_WEIGHT = 0.01
"""The weight of the router's loss; nothing else learns from it, so that only the clipping of gradients notices it."""
SCALE_EPS = 1e-5  # added to the mean square of a token's stream before it is normalised for scores and router


@routing_losses.register("cross_entropy")
def cross_entropy(routing: Routing, real_BT: Tensor) -> Tensor:
    """Teaches a router to predict what was chosen: 0 when it is certain of it, log N when it cannot tell."""
    if routing.scores_BTN is None:
        raise BraidError(f"{routing.name}: cross_entropy needs the router's scores, which this router does not return")
    surprise_BTK = -routing.scores_BTN.float().log_softmax(-1).gather(-1, routing.chosen_BTK)
    return masked_mean((routing.weights_BTK.detach() * surprise_BTK).sum(-1), real_BT)


@stage_kinds.register("mixture_of_depths")
class MixtureOfDepthsStage(Stage):
    """Blocks in a row, some of which only a share of the tokens goes through; the others pass by."""

    inherit = BlockStage.inherit

    @dataclass
    class Config(BlockStage.Config):
        layers: Layers = 2
        """Number of blocks in a row."""
        capacity: Probability = 0.5
        """Share of a sequence's tokens that enter such a block in training. The paper recommends 0.125."""
        every: Layers = 2
        """One block in so many is such a block, the last of them; all tokens go through the others."""

        def __post_init__(self) -> None:
            if self.every > self.layers:
                what = f"every is {self.every}, and there are only {self.layers} layers: no token would pass by any"
                raise BraidError(what, todo=f"Set every to at most {self.layers}.")

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config, self.width_out = config, width
        blocks = [Block(config, width) for _ in range(config.layers)]
        share_weights(config.share, [blocks])
        self.layers = nn.ModuleList()
        for number, block in enumerate(blocks, start=1):
            self.layers.append(block if number % config.every else MixtureOfDepths(block, width, config.capacity))


class MixtureOfDepths(nn.Module):
    """A block that some tokens pass by. Those that enter it attend to each other alone, at their own positions.

    What the block adds to a token is weighted by the sigmoid of its score, through which the scores learn. Scores and
    router read the stream normalised.
    """

    def __init__(self, block: Block, width: int, capacity: float):
        super().__init__()
        self.config, self.capacity = block.config, capacity
        self.score = ScoreLinear(width, 1, bias=False)
        config = RouterConfig(top_k=1, hidden=max(8, width // 4), losses={cross_entropy.__name__: PREDICTION_WEIGHT})
        self.router = TopKRouter(config, width, DEPTH_CHOICES)
        self.block = block
        for module in block.modules():  # what is active for a token, for the accounting of costs
            for share in ("active_share", "product_share"):
                setattr(module, share, capacity * getattr(module, share, 1.0))
            if isinstance(module, AttentionHeads):
                module.pair_share *= capacity**2

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        weight_BT, entered_BT, routing = self.choose(hidden, span.real)
        hidden, routings = self._run(hidden, weight_BT, entered_BT, span)
        return hidden, (routing, *routings)

    def choose(self, hidden: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Routing]:
        """The weight of each token, 0 where it passes by, which tokens enter, and the router's own prediction of it."""
        with torch.autocast(hidden.device.type, enabled=False):
            wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            # Everything is brought to one scale: of the raw stream a router learns far more slowly.
            mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / wide.shape[-1]
            scale_BT1 = (mean_square + SCALE_EPS).rsqrt()
            score_BT = (self.score(wide) * scale_BT1)[..., 0]
        routing = self.router(wide.detach() * scale_BT1.detach())  # learning to predict the choice must not change it
        if self.training:
            ranked_BT = score_BT.detach() if real_BT is None else score_BT.detach().masked_fill(~real_BT, -torch.inf)
            highest_BK = ranked_BT.topk(self.count(ranked_BT.shape[1]), dim=1).indices
            entered_BT = torch.zeros_like(ranked_BT, dtype=torch.bool).scatter(1, highest_BK, True)
            routing = replace(routing, chosen_BTK=(~entered_BT).long()[..., None])
        else:
            entered_BT = routing.chosen_BTK[..., 0] == DEPTH_CHOICES.index("block")
        return (score_BT.sigmoid() * entered_BT).to(hidden.dtype), entered_BT, routing

    def count(self, time: int) -> int:
        """How many tokens of a row enter in training."""
        return max(1, round(self.capacity * time))

    def _run(self, hidden: Tensor, weight_BT: Tensor, entered_BT: Tensor, span: Span) -> tuple[Tensor, Routings]:
        fixed = is_recorded(hidden)
        # A cache has a place for every token, and attention weights are shown for every token.
        if span.cache is not None or span.needs_weights or (fixed and not self.training):
            looks = hidden.is_cpu and not fixed and not span.needs_weights  # on a CPU looking costs nothing
            if looks and not bool(entered_BT.any()):
                return self._skip(hidden, span), ()
            return self.run_masked(hidden, weight_BT, entered_BT, span)
        count = self.count(hidden.shape[1]) if self.training else max(1, int(entered_BT.sum(1).max()))
        return self.run_gathered(hidden, weight_BT, entered_BT, count, span)

    def run_gathered(
        self, hidden: Tensor, weight_BT: Tensor, entered_BT: Tensor, count: int, span: Span
    ) -> tuple[Tensor, Routings]:
        """Run the block on the tokens that entered, at most `count` in a row; rows with fewer are filled with others,
        which nothing sees and whose weight is 0."""
        index_BK, flat_R = entering(entered_BT, count)
        inside = hidden.flatten(0, 1).index_select(0, flat_R).view(*index_BK.shape, -1)
        output, routings = self.block(inside, _gathered_span(span, index_BK, entered_BT))
        weight_BK = weight_BT.gather(1, index_BK)
        added_RW = ((output - inside) * weight_BK[..., None]).flatten(0, 1).to(hidden.dtype)
        hidden = hidden.flatten(0, 1).index_add(0, flat_R, added_RW).view_as(hidden)
        return hidden, tuple(spread_routing(routing, index_BK, entered_BT) for routing in routings)

    def run_masked(self, hidden: Tensor, weight_BT: Tensor, entered_BT: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """The reference for `run_gathered`: the block runs on all tokens, and those that pass by are hidden."""
        output, routings = self.block(hidden, replace(span, present=entered_BT[None]))
        hidden = hidden + ((output - hidden) * weight_BT[..., None]).to(hidden.dtype)
        return hidden, tuple(replace(routing, present_BT=entered_BT) for routing in routings)

    def _skip(self, hidden: Tensor, span: Span) -> Tensor:
        """Leave the block out for a step of generation in which no token enters; the cache counts absent ones."""
        assert span.cache is not None
        for attention in (module for module in self.block.modules() if hasattr(module, "cache_slot")):
            heads, dim = attention.cache_shape  # type: ignore[misc]
            size = (len(hidden), heads, hidden.shape[1], dim)
            keys = torch.full(size, ABSENT, dtype=compute_dtype(hidden), device=hidden.device)
            span.cache.update(keys, torch.zeros_like(keys), attention.cache_slot)  # type: ignore[arg-type]
        return hidden


def entering(entered_BT: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which `count` tokens of each row go through a block, and their places among all tokens of the batch."""
    batch, time = entered_BT.shape
    index_BK = (~entered_BT).byte().argsort(dim=1, stable=True)[:, :count]  # in their order, then the others
    return index_BK, (index_BK + time * torch.arange(batch, device=index_BK.device)[:, None]).flatten()


def _gathered_span(span: Span, index_BK: Tensor, entered_BT: Tensor) -> Span:
    """The span for some tokens of each row; without masks they are in causal order."""
    batch, there_BK = len(index_BK), entered_BT.gather(1, index_BK)
    row = torch.arange(batch, device=index_BK.device)[:, None, None]

    def gathered(mask: Tensor) -> Tensor:
        seen_BKK = mask.expand(batch, -1, -1, -1)[row, 0, index_BK[:, :, None], index_BK[:, None, :]]
        seen_BKK = seen_BKK & there_BK[:, None]
        # A token that only fills up may see no key at all: NaN would spread.
        return (seen_BKK | ~seen_BKK.any(-1, keepdim=True))[:, None]

    return replace(
        span,
        positions=span.positions.expand(batch, -1).gather(1, index_BK),
        masks={window: None if mask is None else gathered(mask) for window, mask in span.masks.items()},
        rotations={dim: None if rotate is None else rotate.at(index_BK) for dim, rotate in span.rotations.items()},
        real=None,
    )


def spread_routing(routing: Routing, index_BK: Tensor, entered_BT: Tensor) -> Routing:
    """A routing of some tokens as one of all, in which the others are not present."""

    def spread(values: Tensor) -> Tensor:
        zeros = values.new_zeros(*entered_BT.shape, values.shape[-1])
        return zeros.scatter(1, index_BK[..., None].expand_as(values), values)

    return replace(
        routing,
        probabilities_BTN=spread(routing.probabilities_BTN),
        chosen_BTK=spread(routing.chosen_BTK),
        weights_BTK=spread(routing.weights_BTK),
        scores_BTN=None if routing.scores_BTN is None else spread(routing.scores_BTN),
        present_BT=entered_BT,
    )
