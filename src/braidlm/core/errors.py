"""Errors that a user can cause. The class is in `model`, because a model folder must work without braidlm."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from braidlm.model.errors import BraidError, did_you_mean

__all__ = ["BraidError", "check_folder_name", "collecting", "did_you_mean", "errors_at"]

MAX_NAME_BYTES = 200
"""File systems allow 255; a name also gets suffixes."""


def check_folder_name(key: str, name: str) -> None:
    """Refuse a name that is not the name of one folder: it would be made, or emptied, somewhere else."""
    if not name.strip() or name in (".", "..") or any(character in name for character in "/\\\0"):
        raise BraidError(f"{key}: expected the name of one folder, got '{name}'", todo="Use out=DIR for another place.")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise BraidError(f"{key}: a name may have at most {MAX_NAME_BYTES} bytes, got '{name[:20]}...'")


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Let an error in the block say where what it checked was read, which the check itself does not know."""
    try:
        yield
    except BraidError as error:
        raise BraidError(error.what, where, error.todo) from error


@contextmanager
def collecting(problems: list[str], label: str = "") -> Iterator[None]:
    """Add an error in the block to `problems` and go on, so that one error can report all of them.

    The label comes before each problem of the error; indented lines belong to the problem above them.
    """
    try:
        yield
    except BraidError as error:
        problems.append(re.sub(r"^(?! )", lambda _: label, error.what, flags=re.MULTILINE))
