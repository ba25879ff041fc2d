"""An embedding from the bytes of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...routing.dispatch import compute_dtype
from ..ends import Embedding, embeddings
from .blocks import ByteConfig, SymbolBlocks, scale_by_inputs
from .spelling import SYMBOLS, Remembered, Spelling

GROUP = 32
"""Tokens whose vectors are computed together in evaluation: always the same ones, so that they round alike."""


class TokenVectors(NamedTuple):
    """Vectors of tokens that are known already."""

    vectors: Tensor
    """[token, width]."""
    known: Tensor
    """[group of tokens]."""


@embeddings.register("bytes")
class ByteEmbedding(Embedding):
    """The mean over a token's bytes, after a small bidirectional transformer has read them together (STLM)."""

    Config = ByteConfig

    def __init__(self, config: ByteConfig, vocab_size: int, width: int):
        super().__init__()
        self.config, self.width = config, width
        self.spelling = Spelling(vocab_size, config.piece, config.bytes_per_token)
        self.symbols = nn.Embedding(SYMBOLS, config.width)
        self.positions = nn.Embedding(config.piece, config.width)
        self.blocks = SymbolBlocks(config, causal=False)
        self.out = nn.Linear(config.width, width, bias=False)
        scale_by_inputs(self)
        self.recalled: Remembered[TokenVectors] = Remembered()

    def read_tokenizer(self, tokens: Sequence[bytes | None]) -> None:
        self.spelling.read(tokens)

    def agrees_with(self, tokens: Sequence[bytes | None]) -> bool:
        return self.spelling.agrees_with(tokens)

    def train(self, mode: bool = True) -> "ByteEmbedding":
        if mode:
            self.recalled.forget()
        return super().train(mode)

    def forward(self, ids: Tensor) -> Tensor:
        """Each token of the batch is encoded once; in evaluation, once for as long as the weights stay the same."""
        if not self.training and not torch.is_grad_enabled():
            return F.embedding(ids, self._recall(ids))
        if not ids.is_cuda and not torch.compiler.is_compiling():
            tokens, index = torch.unique(ids, return_inverse=True)
        elif ids.numel() > len(self.spelling.lengths):  # shapes are static here: of the batch or of the vocabulary
            tokens, index = torch.arange(len(self.spelling.lengths), device=ids.device), ids
        else:
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

    def _nothing_known(self, dtype: torch.dtype) -> TokenVectors:
        """Room for all vectors; on a GPU all are computed at once, since a captured step cannot wait for any."""
        count, device = len(self.spelling.lengths), self.spelling.lengths.device
        vectors = torch.empty(count, self.width, dtype=dtype, device=device)
        if vectors.is_cuda:
            for tokens in torch.arange(count, device=device).split(256 * GROUP):
                vectors[tokens] = self.encode(tokens).to(dtype)
        return TokenVectors(vectors, torch.zeros(-(-count // GROUP), dtype=torch.bool, device=device))
