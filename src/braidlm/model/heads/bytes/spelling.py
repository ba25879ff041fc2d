"""How tokens are spelled: the bytes of each token, kept with the model's weights.

A token's symbols are its bytes. A token without bytes, such as the end of text, is spelled by its number among such
tokens in base 16, whose digits are symbols of their own; so are all tokens of a model that has read no tokenizer yet.
After its last symbol comes END, so that no spelling is the beginning of another.

Symbols are read and written in pieces of a fixed size. A token of more symbols, END included, has several pieces: the
first, and later ones, each of which is known together with the piece before it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...compiling import uncompiled
from ...errors import BraidError
from ...exporting import is_exporting

V = TypeVar("V")


class Remembered(Generic[V]):
    """A value that follows from tensors and is computed again once these have changed; no part of a module's state."""

    def __init__(self) -> None:
        self.state: Any = None
        self.value: V | None = None

    @uncompiled  # it looks at addresses of tensors
    def get(self, tensors: Iterable[Tensor], compute: Callable[[], V], *also: Any) -> V:
        """The value of `compute`, which depends on the tensors and on `also`."""
        if is_exporting():  # tensors have no addresses, and their values are not known
            if self.value is None:
                raise BraidError("an export needs what one pass over a text finds", todo="Call the model once before.")
            return self.value
        # This differs after a tensor was written to, moved or replaced.
        state = (*also, *((t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device) for t in tensors))
        if self.value is None or state != self.state:
            # A tensor that is made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self.value, self.state = compute(), state
        return self.value

    def forget(self) -> None:
        """Free the memory."""
        self.state = self.value = None


BYTES, DIGITS = 256, 16
SYMBOLS = BYTES + DIGITS
END, NOTHING = SYMBOLS, SYMBOLS + 1  # what follows the last symbol, and what fills a piece after it


class LaterPieces(NamedTuple):
    """Pieces of tokens that have more than one."""

    tokens: Tensor  # [piece] whose they are
    symbols: Tensor  # [piece, 2 x size]: the piece before, then the piece


class Spelling(nn.Module):
    """The symbols of every token of a vocabulary, in pieces of `size`."""

    symbols: Tensor  # all tokens' symbols one after the other
    lengths: Tensor  # [token] how many are its own; negative where they are digits in place of bytes

    def __init__(self, vocab_size: int, size: int, bytes_per_token: int):
        super().__init__()
        self.size, self.bytes_per_token = size, bytes_per_token
        self.register_buffer("symbols", torch.zeros(vocab_size * bytes_per_token, dtype=torch.uint8))
        self.register_buffer("lengths", torch.zeros(vocab_size, dtype=torch.int32))
        self.layout: Remembered[tuple[Tensor, Tensor]] = Remembered()
        if not self.lengths.is_meta:
            self.read([])

    @torch.no_grad()
    def read(self, tokens: Sequence[bytes | None]) -> None:
        """Spell tokens by their bytes; those without bytes, and those beyond the list, by their numbers."""
        symbols, lengths = self._spelled(tokens)
        self.symbols.zero_()
        self.symbols[: len(symbols)] = symbols.to(self.symbols.device)
        self.lengths.copy_(lengths)

    def agrees_with(self, tokens: Sequence[bytes | None]) -> bool:
        """Whether these tokens are the ones that were read."""
        symbols, lengths = self._spelled(tokens)
        same = torch.equal(lengths, self.lengths.cpu())
        return same and torch.equal(symbols, self.symbols[: len(symbols)].cpu())

    def _spelled(self, tokens: Sequence[bytes | None]) -> tuple[Tensor, Tensor]:
        known: set[bytes] = set()
        spelled, lengths, numbers = [], [], 0
        for index in range(len(self.lengths)):
            token = tokens[index] if index < len(tokens) else None
            if token and token not in known:  # of two tokens with the same bytes, the second has a number
                known.add(token)
                spelled.append(token)
                lengths.append(len(token))
            else:
                spelled.append(_digits(numbers))
                lengths.append(-len(spelled[-1]))
                numbers += 1
        joined = b"".join(spelled)
        if len(joined) > len(self.symbols):
            needed = -(-len(joined) // len(self.lengths))
            what = f"the tokens have {needed} bytes on average, and the model has room for {self.bytes_per_token}"
            todo = f"Set bytes_per_token: {needed}, in the embedding and in the head."
            raise BraidError(what, "bytes_per_token", todo)
        found = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        return found, torch.tensor(lengths, dtype=torch.int32, device="cpu")

    def first(self, tokens: Tensor) -> Tensor:
        """[token, size]: the first piece of each of tokens [token]."""
        return self._read(tokens, torch.arange(self.size, device=tokens.device)[None])

    def later(self, tokens: Tensor | None = None) -> LaterPieces | None:
        """All later pieces; None if there are none. With `tokens`, it may be only those of these."""
        owners, begins = self.layout.get((self.symbols, self.lengths), self._find_later)
        if not len(owners):
            return None
        # On a GPU it would have to wait for the number of those, and a captured step cannot.
        if tokens is not None and not tokens.is_cuda and not torch.compiler.is_compiling():
            asked = torch.zeros(len(self.lengths), dtype=torch.bool, device=tokens.device)
            asked[tokens] = True
            owners, begins = owners[asked[owners]], begins[asked[owners]]
            if not len(owners):
                return None
        window = torch.arange(-self.size, self.size, device=owners.device)
        return LaterPieces(owners, self._read(owners, begins[:, None] + window))

    def _find_later(self) -> tuple[Tensor, Tensor]:
        """[piece] whose each later piece is, and at which of its symbols it begins."""
        counts = self.lengths.abs() // self.size  # END is a symbol too
        owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        return owners, (torch.arange(len(owners), device=counts.device) - before + 1) * self.size

    def _read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The symbols of tokens [token] at positions [token or 1, position]."""
        lengths = self.lengths.abs()
        starts, own = (lengths.cumsum(0) - lengths)[tokens][:, None], lengths[tokens][:, None]
        symbols = self.symbols[(starts + positions).clamp(0, len(self.symbols) - 1)].long()
        symbols = symbols + BYTES * (self.lengths[tokens] < 0)[:, None]
        return symbols.masked_fill(positions == own, END).masked_fill(positions > own, NOTHING)


def _digits(number: int) -> bytes:
    digits = [number % DIGITS]
    while number := number // DIGITS:
        digits.insert(0, number % DIGITS)
    return bytes(digits)
