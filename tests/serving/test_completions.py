"""Readers are woken together, after a pause that leaves the interpreter to the engine, and no wake-up is lost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from braidlm.serving import completions
from braidlm.serving.completions import PAUSE, Completion, Mailbox, NewToken, Request


class Loop:
    """An event loop that does what it was asked for when the test says so."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.soon.append((call, args))

    call_soon_threadsafe = call_soon

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append((seconds, call))

    def run(self) -> None:
        calls, self.soon = self.soon, []
        for call, args in calls:
            call(*args)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0, worked=5.0)
    clock.monotonic, clock.thread_time = lambda: clock.now, lambda: clock.worked
    monkeypatch.setattr(completions, "time", clock)
    return clock


def test_an_event_loop_rests_three_times_as_long_as_it_sent_and_misses_nothing(clock: Any) -> None:
    loop, woken = Loop(), []
    box = Mailbox(loop)  # type: ignore[arg-type]
    texts = [Completion(Request((1,), 9), lambda completion: None) for _ in range(2)]
    for text in texts:
        text.mailbox = box
        text.wake = lambda text=text: (setattr(text, "_is_ready", False), woken.append(text))  # type: ignore[method-assign,misc]

    def arrive() -> None:
        for text in texts:
            text.add(NewToken(7))
        box.post()

    arrive()
    arrive()
    assert len(loop.soon) == 1, "one call for all texts and steps"
    loop.run()
    assert woken == texts
    clock.worked += 0.5  # the readers send, while the engine goes on
    arrive()
    assert len(loop.soon) == 1, "only the end of the sending"
    loop.run()
    assert len(loop.soon) == 1, "what arrived meanwhile is not forgotten"
    clock.now += 0.25
    loop.run()
    assert woken == texts
    ((seconds, call),) = loop.later
    assert seconds == pytest.approx(PAUSE * 0.5 - 0.25)
    arrive()
    assert not loop.soon
    clock.now += seconds
    call()
    assert woken == [*texts, *texts]
