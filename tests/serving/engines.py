"""Engines of tiny models, and what their texts are alone."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.folders import save_model
from braidlm.opening.open import open_model
from braidlm.serving.engine import Completion, Engine, NewToken, Request
from tests.tiny_models import ToyTokenizer, tiny_model

LIMIT = 32
GREEDY = Sampling(0)


def save_tiny(folder: Path, **architecture: Any) -> Path:
    """A folder with a tiny model and its tokenizer."""
    return save_model(tiny_model(**architecture), folder, ToyTokenizer(), {"made_by": "a test"})


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine on the CPU, which is closed at the end."""
    engine = Engine(open_model(folder), "cpu", **{"length": LIMIT, **options})
    try:
        yield engine
    finally:
        engine.close(drain=False)


def alone(model: Any, prompt: Sequence[int], tokens: int, eos_id: int | None = None) -> list[int]:
    """What one text gets by itself, greedily."""
    steps = decode_tokens(Decoder(model, 1, LIMIT), [list(prompt)], tokens, GREEDY, eos_id)
    return [int(chosen[0] or 0) for chosen, _ in steps]


async def read(completion: Completion) -> list[NewToken]:
    """All tokens of a text."""
    return [token async for some in completion.tokens() for token in some]


def texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of several requests that are made at once."""

    async def all_of_them() -> list[list[NewToken]]:
        return await asyncio.gather(*(read(engine.submit(request)) for request in requests))

    return [[token.id for token in text] for text in asyncio.run(all_of_them())]
