"""Pause tokens after a prompt: time for a model that was trained with them."""

from braidlm.core.errors import BraidError
from braidlm.core.tokenizer import Tokenizer


def pause_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """So many pause tokens, which only the tokenizer of a model that was trained with them has."""
    if count and tokenizer.pause_id is None:
        raise BraidError(
            "this model has no pause token: it was not trained with pauses",
            todo="Leave out the pauses, or train a model with data.pauses.",
        )
    return [] if tokenizer.pause_id is None else [tokenizer.pause_id] * count
