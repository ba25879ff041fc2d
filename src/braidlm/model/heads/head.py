"""Heads: from vectors to logits, log-probabilities and the loss."""

from torch import Tensor

from ..config.registry import Registry
from .embedding import Embedding
from .ends import ModelEnd
from .losses import log_probabilities_of, next_token_loss

heads = Registry("head", third_party=True)


class Head(ModelEnd):
    """The base class: `forward` gives the logits [..., vocabulary] of vectors [..., width].

    Where a whole vocabulary is expensive (a decoder of bytes), it has its own `loss` and `log_probabilities` too.
    """

    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """The loss of targets [batch, time], each at the position that predicts it, from a stream [batch, time, width].

        `count` is as in `next_token_loss`; `logits` may be known already.
        """
        return next_token_loss(self(hidden) if logits is None else logits, targets, count)

    def log_probabilities(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """[token] of each of `tokens`, predicted by the row of hidden [row, width] that `rows` [token] says."""
        return self.scores(self(hidden), rows, tokens)

    def scores(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """The same from logits that are known already."""
        return log_probabilities_of(logits, rows, tokens)

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        """Parameters that `tie_embeddings` shares: the head's name of each, and the embedding's."""
        return {}
