"""What model folders, generation and scoring need of a tokenizer; `data.tokenizing` has the class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from braidlm.core.errors import BraidError


class Tokenizer(Protocol):
    """What this floor needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def save(self, folder: Path) -> None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def token_bytes(self) -> list[bytes | None]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def beginning(self) -> list[int]: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def pause_id(self) -> int | None: ...


def pause_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """So many pause tokens, which only the tokenizer of a model that was trained with them has."""
    if count and tokenizer.pause_id is None:
        what = "this model has no pause token: it was not trained with pauses"
        raise BraidError(what, todo="Leave out the pauses, or train a model with data.pauses.")
    return [] if tokenizer.pause_id is None else [tokenizer.pause_id] * count
