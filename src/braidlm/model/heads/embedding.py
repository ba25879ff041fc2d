"""Embeddings: from tokens to vectors."""

from dataclasses import dataclass

from torch import nn

from ..config.registry import Registry
from .ends import ModelEnd

embeddings = Registry("embedding", third_party=True)


class Embedding(ModelEnd):
    """The base class: `forward` gives the vectors [batch, time, width] of token ids [batch, time]."""


@embeddings.register("tokens")
class TokenEmbedding(Embedding, nn.Embedding):
    """A learned vector for each token."""

    composed = {"weight": "side by side"}

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, vocab_size: int, width: int):
        super().__init__(vocab_size, width)
        self.config = config
