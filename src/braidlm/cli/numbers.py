"""Numbers on the command line: the types of numeric options, with the ranges of recipe keys."""

import argparse
from collections.abc import Callable
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode, plain_type


def number(hint: Any) -> Callable[[str], Any]:
    """argparse's `type` for a number of this type, such as `Count`; argparse names the option in the message."""
    kind = plain_type(hint)

    def read(text: str) -> Any:
        try:
            return decode(hint, _parsed(kind, text))
        except BraidError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _parsed(kind: type, text: str) -> Any:
    """The number that a text is; the text itself where it is none, which decoding explains."""
    try:
        return kind(text)
    except ValueError:
        return text
