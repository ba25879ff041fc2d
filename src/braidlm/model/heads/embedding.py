"""Where a token becomes a vector, and a vector becomes scores of tokens."""

from dataclasses import dataclass

from torch import nn

from ..config.registry import Registry

embeddings = Registry("embedding", third_party=True)
heads = Registry("head", third_party=True)


@embeddings.register("tokens")
class TokenEmbedding(nn.Embedding):
    """A learned vector for each token."""

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, vocab_size: int, width: int):
        super().__init__(vocab_size, width)


@heads.register("linear")
class LinearHead(nn.Linear):
    """A score for each token by one product; it may share its matrix with the embedding."""

    @dataclass
    class Config:
        bias: bool = False
        """Whether each token has a learned bias."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(width, vocab_size, bias=config.bias)
