"""The two ends of a model: embeddings, from tokens to vectors, and heads, from vectors to logits and the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config.registry import NoOptions, Registry
from ..span import Span, Stream, TextPass
from .losses import log_probabilities_of, next_token_loss


class ModelEnd(nn.Module):
    """An embedding or a head: the rest of the code asks it and never reads its weights."""

    composed: ClassVar[dict[str, str]] = {}
    """How `compose` makes each parameter from the paths', "side by side" or "added up"; it refuses a part without."""

    @classmethod
    def composed_config(cls, configs: Sequence[Any]) -> Any:
        """The configuration of a composed end from those of its paths; None if they do not fit together."""
        return configs[0] if all(config == configs[0] for config in configs) else None

    def read_tokenizer(self, tokens: Sequence[bytes | None]) -> None:
        """Take over the bytes of each token by its id, None for those without, such as the end of text."""

    def agrees_with(self, tokens: Sequence[bytes | None]) -> bool:
        """Whether these are the tokens that were read; an end that reads none agrees with any."""
        return True


embeddings = Registry("embedding", third_party=True)


class Embedding(ModelEnd):
    """The base class: `forward` gives the vectors [batch, time, width] of token ids [batch, time]."""


@embeddings.register("tokens")
class TokenEmbedding(Embedding, nn.Embedding):
    """A learned vector for each token."""

    Config = NoOptions
    composed = {"weight": "side by side"}

    def __init__(self, config: NoOptions, vocab_size: int, width: int):
        super().__init__(vocab_size, width)
        self.config = config


heads = Registry("head", third_party=True)


class Head(ModelEnd):
    """The base class: `forward` gives the logits [..., vocabulary] of vectors [..., width].

    Where a whole vocabulary is expensive (a decoder of bytes), it has its own `loss` and `log_probabilities` too.
    A head with `cache_shapes` reads the text beside the stream: its `forward`, `loss` and `log_probabilities` are given
    what `read` returns, by name.
    """

    cache_shapes: Sequence[tuple[int, int]] = ()
    """Heads and channels of each layer that `read` keeps in a cache, from `first_slot` on."""
    first_slot = 0
    window: int | None = None  # how many tokens back `read` looks; None for the whole text

    def read(self, hidden: Tensor, span: Span) -> dict[str, Tensor]:
        """What the head reads in the text, [batch, time, ...], beside the stream [batch, time, width]."""
        raise NotImplementedError("only a head with cache_shapes reads the text")

    def run(self, stream: Stream, embedded: Tensor, span: Span) -> TextPass:
        """A pass over embedded tokens, of a head that reads the text: it may leave out what it will not read."""
        hidden, routings = stream(embedded, span)
        return TextPass(hidden, routings, self.read(hidden, span))

    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """The loss of targets [batch, time], each at the position that predicts it, from a stream [batch, time, width].
        `count` is as in `next_token_loss`; `logits` may be known already."""
        return next_token_loss(self(hidden) if logits is None else logits, targets, count)

    def log_probabilities(self, hidden: Tensor, rows: Tensor, tokens: Tensor, **read: Tensor) -> Tensor:
        """[token] of each of `tokens`, predicted by the row of hidden [row, width] that `rows` [token] says."""
        return self.scores(self(hidden, **read), rows, tokens)

    def scores(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities from logits that are known already."""
        return log_probabilities_of(logits, rows, tokens)

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        """Parameters that `tie_embeddings` shares: the head's name of each, and the embedding's."""
        return {}


@heads.register("linear")
class LinearHead(Head, nn.Linear):
    """A linear layer to logits; it may share its matrix with the embedding."""

    composed = {"weight": "side by side", "bias": "added up"}

    @dataclass
    class Config:
        bias: bool = False
        """Whether each token has a learned bias."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(width, vocab_size, bias=config.bias)
        self.config = config

    @classmethod
    def composed_config(cls, configs: Sequence[Config]) -> Config:
        return cls.Config(bias=any(config.bias for config in configs))

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        return {"weight": "weight"} if isinstance(embedding, TokenEmbedding) else {}
