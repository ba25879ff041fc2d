"""A head that writes all bytes of the next token at once."""

from dataclasses import dataclass

from torch import Tensor

from ..head import heads
from .blocks import ByteConfig
from .decoder import ByteHead
from .spelling import NOTHING


@heads.register("bytes_parallel")
class ParallelByteHead(ByteHead):
    """Every byte of the next token is predicted from the stream alone, independently of the others (STLM)."""

    causal = False

    @dataclass
    class Config(ByteConfig):
        pass

    def inputs(self, slots: Tensor, before: Tensor) -> Tensor:
        return slots

    def vocabulary(self, hidden: Tensor) -> Tensor:
        found, pieces = self.all_symbols(self.blocks(self.slots_of(hidden))), self.all_first_pieces()
        scores = found.new_zeros(len(hidden), len(pieces))
        for position, symbols in enumerate(pieces.t()):
            real = symbols != NOTHING
            scores = scores + found[:, position, symbols.where(real, 0)] * real
        return scores
