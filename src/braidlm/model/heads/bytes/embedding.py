"""Small transformers over the symbols of a token, and an embedding by one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config.ranges import Heads, LayersOrZero, Size
from ...errors import BraidError
from ...exporting import is_exporting
from ...feed.feeds import SwiGLU
from ...norms import RMSNorm
from ...routing.dispatch import compute_dtype
from ...routing.stacked import without_residual
from ..ends import Embedding, ModelEnd, embeddings
from .spelling import SYMBOLS, Remembered, Spelling

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

    def _heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3 * self.config.heads, -1)).transpose(1, 2)
        return qkv.split(self.config.heads, dim=1)  # type: ignore[no-any-return]

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

    gradient_checkpointing = False  # set by transformers' `gradient_checkpointing_enable`

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


class ByteEnd(ModelEnd):
    """What the embedding and the heads of bytes share: the spelling of tokens, and vectors of symbols."""

    def __init__(self, config: ByteConfig, width: int, vocab_size: int):
        super().__init__()
        self.config, self.width = config, width
        self.spelling = Spelling(vocab_size, config.piece, config.bytes_per_token)

    def read_tokenizer(self, tokens: Sequence[bytes | None]) -> None:
        self.spelling.read(tokens)

    def agrees_with(self, tokens: Sequence[bytes | None]) -> bool:
        return self.spelling.agrees_with(tokens)

    def scale_by_inputs(self) -> None:
        """Let all matrices begin at 1 / sqrt(inputs): a wide model's small standard deviation leaves bytes too weak."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                without_residual(module)


GROUP = 32
"""Tokens whose vectors are computed together in evaluation: always the same ones, so that they round alike."""


@embeddings.register("bytes")
class ByteEmbedding(ByteEnd, Embedding):
    """The mean over a token's bytes, after a small bidirectional transformer has read them together (STLM)."""

    Config = ByteConfig

    def __init__(self, config: ByteConfig, vocab_size: int, width: int):
        super().__init__(config, width, vocab_size)
        self.symbols = nn.Embedding(SYMBOLS, config.width)
        self.positions = nn.Embedding(config.piece, config.width)
        self.blocks = SymbolBlocks(config, causal=False)
        self.out = nn.Linear(config.width, width, bias=False)
        self.scale_by_inputs()
        self.recalled: Remembered[tuple[Tensor, Tensor]] = Remembered()

    def train(self, mode: bool = True) -> "ByteEmbedding":
        if mode:
            self.recalled.forget()
        return super().train(mode)

    def forward(self, ids: Tensor) -> Tensor:
        """Each token of the batch is encoded once; in evaluation, once for as long as the weights stay the same."""
        if not (self.training or torch.is_grad_enabled() or is_exporting()):
            return F.embedding(ids, self._recall(ids))
        if not ids.is_cuda and not torch.compiler.is_compiling():
            tokens, index = torch.unique(ids, return_inverse=True)
        elif not is_exporting() and ids.numel() > len(self.spelling.lengths):  # shapes are static: the vocabulary's
            tokens, index = torch.arange(len(self.spelling.lengths), device=ids.device), ids
        else:  # or those of the batch
            tokens, index = ids.flatten(), torch.arange(ids.numel(), device=ids.device).view_as(ids)
        return F.embedding(index, self.encode(tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        """The vectors [token, width] of tokens [token]."""
        sums = self._sums(self.spelling.first(tokens))
        later = self.spelling.later(tokens)
        if later is not None:
            of_all = sums.new_zeros(len(self.spelling.lengths), sums.shape[1])
            sums = sums + of_all.index_add(0, later.tokens, self._sums(later.symbols))[tokens]
        return self.out(sums / self.spelling.lengths[tokens].abs()[:, None])

    def _sums(self, symbols: Tensor) -> Tensor:
        """The sums [row, width] over the last piece of rows of one or two pieces."""
        real = symbols < SYMBOLS
        positions = self.positions.weight.repeat(symbols.shape[1] // self.config.piece, 1)
        hidden = self.symbols(symbols.clamp(max=SYMBOLS - 1)) + positions
        hidden = self.blocks(hidden, real[:, None, None])
        return (hidden * real[..., None])[:, -self.config.piece :].sum(1)

    def _recall(self, ids: Tensor) -> Tensor:
        """The vectors [token, width] of the vocabulary, of which those of `ids` are filled in."""
        tensors, dtype = (*self.parameters(), *self.buffers()), compute_dtype(self.symbols.weight)
        vectors, known = self.recalled.get(tensors, lambda: self._nothing_known(dtype), dtype)
        if not ids.is_cuda:
            groups = torch.unique(ids // GROUP)
            missing = groups[~known[groups]].tolist()
            with torch.inference_mode(False), torch.no_grad():
                for group in missing:
                    last = min((group + 1) * GROUP, len(vectors))
                    tokens = torch.arange(group * GROUP, last, device=ids.device)
                    vectors[tokens] = self.encode(tokens).to(dtype)
                known[missing] = True
        return vectors

    def _nothing_known(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Room for all vectors [token, width], and which groups of tokens are known; on a GPU all are computed at once,
        since a captured step cannot wait for any."""
        count, device = len(self.spelling.lengths), self.spelling.lengths.device
        vectors = torch.empty(count, self.width, dtype=dtype, device=device)
        if vectors.is_cuda:
            for tokens in torch.arange(count, device=device).split(256 * GROUP):
                vectors[tokens] = self.encode(tokens).to(dtype)
        return vectors, torch.zeros(-(-count // GROUP), dtype=torch.bool, device=device)
