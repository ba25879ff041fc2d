"""Many streams at once, clients that go, bad requests: everybody else gets the text that they would get alone."""

import asyncio
import gc
from pathlib import Path

from braidlm.serving.completions import Completion
from tests.serving.load import Load, texts_alone
from tests.serving.servers import running, until


def test_every_good_request_gets_its_text_and_nothing_is_left(chat_model: Path) -> None:
    """`python -m tests.serving.load` does so with 1,000 requests of 64 clients, and tells time and memory."""
    before = completions()  # those of other tests
    with running([chat_model], waiting=256) as server:
        load = Load(server.url, texts_alone(chat_model))
        asyncio.run(load.run(80, 16))
        assert not load.wrong
        assert sum(load.outcomes.values()) == 80
        assert set(load.outcomes) == {"bad", "cancelled", "whole", "streamed"}
        assert load.beats > 1
        until(server.all_rows_are_free)
        until(lambda: not server.server.server_state.tasks and not server.server.server_state.connections)
        until(lambda: completions() <= before + 1)  # the engine's thread may have the last one in hand


def completions() -> int:
    gc.collect()
    return sum(isinstance(one, Completion) for one in gc.get_objects())
