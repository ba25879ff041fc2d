"""Embeddings: from tokens to vectors."""

from dataclasses import dataclass

from torch import nn

from ..config.registry import Registry

embeddings = Registry("embedding", third_party=True)


@embeddings.register("tokens")
class TokenEmbedding(nn.Embedding):
    """A learned vector for each token."""

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, vocab_size: int, width: int):
        super().__init__(vocab_size, width)
        self.config = config
