"""The head of models side by side whose shares follow Bayes' rule: each counts for as much as it has predicted so far.

What attention does with values, this head does with evidence. Every token says how probable each path found it, and the
shares after a token are the softmax of what all tokens that it sees have said. So masks, padding, trees of texts and
caches mean here what they mean to attention.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.ranges import Range
from ..errors import BraidError
from ..heads.head import heads
from ..span import Span
from .average import AverageHead

ROWS = 4096
"""How many tokens are judged at once, which bounds the memory of their logits."""


@heads.register("posterior")
class PosteriorHead(AverageHead):
    """The same with each path's posterior probability, given the text so far, as its share. Nothing is learned."""

    @dataclass(kw_only=True)
    class Config(AverageHead.Config):
        window: Annotated[int, Range(at_least=2)] | None = None
        """How many tokens back the paths are judged by; by default the whole text."""

    weighs_tokens = True
    product_share = 2.0
    """The matrix is used twice: for what follows a token, and to judge by what did follow."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.window = config.window
        self.cache_shapes = [(1, sum(self.widths)), (1, len(self.names))]
        """Of the stream of every token, and of what the token says of the paths."""

    def read(self, hidden: Tensor, span: Span) -> dict[str, Tensor]:
        """The logarithm of each path's share after each token, [batch, time, path], but for a constant."""
        if span.tokens is None:
            raise BraidError("the head 'posterior' judges its paths by the text, and only embeddings are given")
        mask = span.masks[self.window]
        seen = _cached(hidden, span, self.first_slot)
        said = self.judge(*_before(hidden, seen, mask), span.tokens)
        all_said = _cached(said, span, self.first_slot + 1)
        if mask is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                heard = mask[:, 0].to(said.dtype) @ all_said
        else:
            heard = said.cumsum(1) if all_said.shape[1] == said.shape[1] else all_said.sum(1, keepdim=True)
        heard = heard - self.of_active(heard).amax(-1, keepdim=True)
        return {"evidence": heard.to(hidden.dtype)}

    def judge(self, before: Tensor, is_there: Tensor, tokens: Tensor) -> Tensor:
        """[batch, time, path]: by how much less probable each active path found a token than the best, in logarithms.

        `before` is the stream at the token before it; a token without one says 0. Only the differences of paths count,
        and half precision would lose them in sums over long texts.
        """
        rows = zip(before.flatten(0, 1).split(ROWS), tokens.flatten().split(ROWS), strict=True)
        said = torch.cat(
            [
                torch.stack([-F.cross_entropy(logits, own, reduction="none") for logits in self.path_logits(part)], -1)
                for part, own in rows
            ]
        ).unflatten(0, tokens.shape)
        said = torch.where(is_there[..., None], said - said.amax(-1, keepdim=True), 0.0)
        of_paths = dict(zip(self.active, said.unbind(-1), strict=True))
        nothing = torch.zeros_like(said[..., 0])
        return torch.stack([of_paths.get(index, nothing) for index in range(len(self.names))], dim=-1)

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        if evidence is None:  # vectors without a text, of which all paths know as much
            return super().log_weights(hidden)
        return self.of_active(evidence).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)


def _cached(new: Tensor, span: Span, slot: int) -> Tensor:
    """[batch, keys, channels]: what a layer of the cache has stored, with `new` [batch, time, channels] at its end."""
    if span.cache is None:
        return new
    return span.cache.update(new[:, None], new[:, None], slot)[0][:, 0].to(new.dtype)


def _before(hidden: Tensor, seen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stream [batch, time, width] at the token before each one, the last but one that it sees, and where it is."""
    batch, time, _ = hidden.shape
    if mask is None:
        past = seen.shape[1] - time
        before = F.pad(hidden[:, :-1], (0, 0, 1, 0)) if past == 0 else seen[:, past - 1 : -1]
        return before, (torch.arange(past, past + time, device=hidden.device) > 0).expand(batch, -1)
    numbers = mask[:, 0] * torch.arange(1, seen.shape[1] + 1, device=hidden.device)
    own = numbers.amax(-1, keepdim=True)
    number = torch.where(numbers == own, 0, numbers).amax(-1).expand(batch, -1)
    index = (number - 1).clamp_min(0)[..., None].expand(-1, -1, seen.shape[-1])
    return seen.gather(1, index), number > 0
