"""The linear head."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .ends import Embedding, Head, TokenEmbedding, heads


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
