"""A head that writes the next token byte by byte."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..head import heads
from .blocks import ByteConfig, KeysValues
from .decoder import ByteHead
from .remembered import Remembered
from .spelling import END, NOTHING, SYMBOLS

KEYS_AT_ONCE = 1 << 18
"""How many keys of one layer are in memory together, in rows of the stream; one row may need more."""


class Prefixes(NamedTuple):
    """The distinct first symbols, so many of them, of the tokens of a vocabulary."""

    parents: Tensor
    """[prefix] which of the prefixes that are one symbol shorter it continues."""
    last: Tensor
    """[prefix] its last symbol."""
    tokens: Tensor
    """[token] the tokens that go on after a prefix of this length, be it with their end."""
    chosen: Tensor
    """[token] where the next symbol of each is among those of all prefixes, [prefix x symbol]."""


@heads.register("bytes_autoregressive")
class AutoregressiveByteHead(ByteHead):
    """Every byte of the next token is predicted from the stream and from the bytes before it."""

    causal = True

    @dataclass
    class Config(ByteConfig):
        pass

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.tree: Remembered[list[Prefixes]] = Remembered()

    def inputs(self, slots: Tensor, before: Tensor) -> Tensor:
        return slots + self.vectors_of(before)

    def vocabulary(self, hidden: Tensor) -> Tensor:
        """Exact for every token: a prefix that several tokens share is computed once for all of them."""
        tree = self.tree.get((self.spelling.symbols, self.spelling.lengths), self._find_prefixes)
        keys = max(len(level.parents) * (depth + 1) for depth, level in enumerate(tree))
        return torch.cat([self._scores(rows, tree) for rows in hidden.split(max(1, KEYS_AT_ONCE // keys))])

    def _find_prefixes(self) -> list[Prefixes]:
        """The prefixes of each length."""
        pieces = self.all_first_pieces()
        tokens = torch.arange(len(pieces), device=pieces.device)
        node = torch.zeros_like(tokens)
        levels: list[Prefixes] = []
        for position, symbols in enumerate(pieces.t()):
            if position:
                tokens = tokens[symbols[tokens] != NOTHING]
                if not len(tokens):
                    break
                keys, index = torch.unique(node[tokens] * SYMBOLS + pieces[tokens, position - 1], return_inverse=True)
                node = torch.zeros_like(node).index_copy(0, tokens, index)
            else:
                keys = tokens[:1]
            chosen = node[tokens] * (END + 1) + symbols[tokens]
            levels.append(Prefixes(keys // SYMBOLS, keys % SYMBOLS, tokens, chosen))
        return levels

    def _scores(self, hidden: Tensor, tree: list[Prefixes]) -> Tensor:
        slots, rows = self.slots_of(hidden), len(hidden)
        wide = torch.promote_types(slots.dtype, torch.float32)
        scores = slots.new_zeros(rows, len(self.spelling.lengths), dtype=wide)
        past: list[KeysValues] = []
        for position, level in enumerate(tree):
            inputs = slots[:, position, None]
            if position:
                inputs = inputs + self.vectors_of(level.last)
                past = [_of_parents(keys_values, rows, level.parents) for keys_values in past]
            stepped, past = self.blocks.step(inputs.flatten(0, 1)[:, None], past)
            found = self.all_symbols(stepped[:, 0]).view(rows, -1)
            scores = scores.index_add(1, level.tokens, found[:, level.chosen])
        return scores


def _of_parents(keys_values: KeysValues, rows: int, parents: Tensor) -> KeysValues:
    """The keys and values of each prefix's parent, for each row of the stream."""
    key, value = (tensor.unflatten(0, (rows, -1))[:, parents].flatten(0, 1) for tensor in keys_values)
    return key, value
