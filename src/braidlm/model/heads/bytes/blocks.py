"""Small transformers over the symbols of a token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config.ranges import Heads, LayersOrZero, Size
from ...errors import BraidError
from ...feed.feeds import SwiGLU
from ...norms import RMSNorm

KeysValues = tuple[Tensor, Tensor]


@dataclass
class ByteConfig:
    """The options of embeddings and heads that read or write bytes."""

    width: Size = 128
    """Channels of a byte."""
    layers: LayersOrZero = 2
    """Transformer layers over the bytes of a token."""
    heads: Heads = 4
    """Attention heads of a layer."""
    piece: Size = 12
    """How many bytes, the end of the token included, are read or written at once; longer tokens are divided."""
    bytes_per_token: Size = 16
    """The table of all tokens' bytes has room for this many on average; a single token may be of any length."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise BraidError(f"a width of {self.width} does not divide into {self.heads} heads")


class SymbolBlock(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, config: ByteConfig, causal: bool):
        super().__init__()
        width = config.width
        self.config, self.causal = config, causal
        self.attention_norm, self.feed_norm = RMSNorm(RMSNorm.Config(), width), RMSNorm(RMSNorm.Config(), width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = SwiGLU(SwiGLU.Config(), width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """[row, symbol, width] in and out; `mask` [row, 1, 1, symbol] is true for symbols that are seen."""
        query, key, value = self._heads(hidden)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self._add(hidden, attended)

    def step(self, hidden: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """One more symbol [row, 1, width] after those of `past`; gives the keys and values of all."""
        query, key, value = self._heads(hidden)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        return self._add(hidden, F.scaled_dot_product_attention(query, key, value)), (key, value)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3 * self.config.heads, -1)).transpose(1, 2)
        query, key, value = qkv.split(self.config.heads, dim=1)
        return query, key, value

    def _add(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed(self.feed_norm(hidden))[0]

    def score_flops(self, length: int) -> int:
        """FLOPs of the attention without its projections, of the symbols of one token."""
        size = self.config.piece
        pairs = size * (size + 1) // 2 if self.causal else size * size
        return 4 * self.config.width * pairs


class SymbolBlocks(nn.Module):
    """Layers over the symbols of each token, and a norm."""

    gradient_checkpointing = False
    """Set by transformers' `gradient_checkpointing_enable`."""

    def __init__(self, config: ByteConfig, causal: bool):
        super().__init__()
        self.blocks = nn.ModuleList(SymbolBlock(config, causal) for _ in range(config.layers))
        self.norm = RMSNorm(RMSNorm.Config(), config.width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.product_share = config.piece  # type: ignore[assignment]  # it is applied to every symbol

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """[row, symbol, width] in and out."""
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(block, hidden, mask, use_reentrant=False)
            else:
                hidden = block(hidden, mask)
        return self.norm(hidden)

    def step(self, hidden: Tensor, past: list[KeysValues]) -> tuple[Tensor, list[KeysValues]]:
        """One more symbol [row, 1, width]; `past` has the keys and values of each layer, nothing for the first."""
        present = []
        for index, block in enumerate(self.blocks):
            hidden, keys_values = block.step(hidden, past[index] if past else None)  # type: ignore[operator]
            present.append(keys_values)
        return self.norm(hidden), present


def scale_by_inputs(end: nn.Module) -> None:
    """Let all matrices begin at 1 / sqrt(inputs): the small standard deviation of wide models leaves bytes too weak."""
    for module in end.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.no_residual = True  # type: ignore[assignment]
