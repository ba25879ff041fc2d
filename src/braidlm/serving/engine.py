"""Continuous batching: one thread for one model, which requests join and leave at every step."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from braidlm.core.decoding.choosing import Chooser
from braidlm.core.decoding.generation import TransformersDecoder, without_pauses
from braidlm.core.decoding.rows import BraidRows, RowDecoder, SingleText
from braidlm.core.decoding.transformers_rows import TransformersRows
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.opened_model import OpenedModel
from braidlm.serving.completions import Completion, NewToken, Request
from braidlm.serving.lanes import Lane
from braidlm.serving.switches import PartSwitches, Switches

__all__ = ["Busy", "Completion", "Engine", "NewToken", "Request", "Switches"]

T = TypeVar("T")
AS_THE_FOLDER_SAYS = Switches()
IDLE_LANES = 4
"""How many caches of switches that nobody uses now are kept."""
LENGTH = 1024
"""The longest text in tokens of a model that has neither a limit nor a longer context."""


class Busy(BraidError):
    """As many requests wait as may."""


class Engine:
    """Continues texts with one model. All of its methods but `call` may be used from any thread."""

    def __init__(
        self,
        opened: OpenedModel,
        device: str = "auto",
        rows: int = 64,
        length: int | None = None,
        waiting: int = 256,
        dtype: torch.dtype | None = None,
    ):
        """Loads the model. `rows` texts are continued at once, each of at most `length` tokens, and `waiting` wait."""
        self.opened, self.tokenizer = opened, opened.tokenizer
        self.model: Any = opened.load(choose_device(device), dtype)
        limits = [limit for limit in (length, opened.limit) if limit is not None]
        self.limit = min(limits, default=max(opened.context or 0, LENGTH))
        """The longest text in tokens."""
        self.most_waiting, self.tokens_generated = waiting, 0
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = (self.tokenizer.eos_id, *(named if isinstance(named, list) else [named]))
        self.ends = frozenset(token for token in ends if token is not None)
        """The tokens that end a text and are no part of it: also those that a model names, such as a chat turn's."""
        self._parts = PartSwitches(self.model)
        self._make_decoder, self.facts = _decoding(self.model, rows, self.limit)
        self.rows = int(self.facts["rows"])
        self._lanes: dict[Switches, Lane] = {}
        braid = isinstance(opened, OpenedBraid)
        skeleton = opened.info.model if braid else opened.skeleton(torch.float32)  # type: ignore[attr-defined]
        self._checker, self._checking = PartSwitches(skeleton), threading.Lock()
        self._changed = threading.Condition()
        """Guards what other threads write: the requests that wait, the work, and whether the engine is to stop."""
        self._waiting: deque[Completion] = deque()
        self._work: deque[tuple[Callable[[Any], Any], Switches, Future[Any]]] = deque()
        self._closing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine of {opened.name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many texts are being continued."""
        return sum(len(lane.texts) for lane in list(self._lanes.values()))

    @property
    def free(self) -> int:
        """How many more texts can be continued at once."""
        return self.rows - self.running

    def submit(self, request: Request) -> Completion:
        """Ask for the continuation of a text; `Busy` where too many wait, and an error for what cannot be done."""
        tokens, vocabulary = len(request.prompt), self.opened.vocab_size
        if not tokens or not all(0 <= token < vocabulary for token in request.prompt):
            raise BraidError(f"a prompt is to have tokens from 0 to {vocabulary - 1}")
        if request.max_tokens < (0 if request.prompt_logprobs else 1):
            raise BraidError(f"max_tokens: expected a number above 0, got {request.max_tokens}")
        if tokens >= self.limit + (request.max_tokens == 0):
            what = f"the prompt has {tokens} tokens, and the model's limit is {self.limit}"
            raise BraidError(what, todo="Shorten the prompt.")
        self.check_switches(request.switches)
        request = replace(request, sampling=without_pauses(request.sampling, self.tokenizer))
        completion = Completion(request, self._cancel)
        with self._changed:
            if self._closing:
                raise BraidError("the server is about to stop, and takes no more requests")
            if len(self._waiting) >= self.most_waiting:
                todo = "Try again later, or let more wait."
                raise Busy(f"{len(self._waiting)} requests wait already, as many as may", todo=todo)
            self._waiting.append(completion)
            self._changed.notify()
        return completion

    def check_switches(self, switches: Switches) -> None:
        """Refuse unknown names, before a request waits; texts that run now are not held up."""
        if switches != AS_THE_FOLDER_SAYS:
            with self._checking:
                self._checker.apply(switches)

    async def call(self, work: Callable[[Any], T], switches: Switches = AS_THE_FOLDER_SAYS) -> T:
        """Run `work(model)` on the engine's thread between two steps, with these switches."""
        self.check_switches(switches)
        done: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise BraidError("the server is about to stop, and takes no more requests")
            self._work.append((work, switches, done))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    def close(self, drain: bool = True) -> None:
        """Stop; with `drain`, requests that wait or run end first, and without they are cancelled."""
        with self._changed:
            self._closing = True
            self._stopping = not drain
            self._changed.notify()
        self._thread.join()

    def _cancel(self, completion: Completion) -> None:
        with self._changed:
            if completion in self._waiting:
                self._waiting.remove(completion)
                completion.end("cancelled")
        self._post([completion])

    def _run(self) -> None:
        """The thread's: work until the engine is closed and nothing is left to do."""
        while self._wait():
            self._do_work()
            if self._stopping:
                running = [text.completion for lane in self._lanes.values() for text in lane.texts.values()]
                for completion in (*self._waiting, *running):
                    completion.cancelled = True
            self._begin_texts()
            touched: list[Completion] = []
            for lane in list(self._lanes.values()):
                touched += [text.completion for text in lane.texts.values()]
                self._advance(lane)
            self._post(touched)
            self._drop_idle()

    def _wait(self) -> bool:
        """Wait for something to do; false where nothing more will come."""
        with self._changed:
            while not (self._waiting or self._work or any(not lane.is_idle for lane in self._lanes.values())):
                if self._closing:
                    self._lanes.clear()
                    return False
                self._changed.wait()
        return True

    def _do_work(self) -> None:
        while self._work:
            work, switches, done = self._work.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                self._parts.apply(switches)
                with torch.inference_mode():
                    result = work(self.model)
            except Exception as error:  # the caller's, whatever it is
                done.set_exception(error)
            else:
                done.set_result(result)

    def _begin_texts(self) -> None:
        while self._waiting and self.free > 0:
            with self._changed:
                if not self._waiting:
                    return
                completion = self._waiting.popleft()
            if completion.cancelled:
                completion.end("cancelled")
            else:
                try:
                    request, switches = completion.request, completion.request.switches
                    lane = self._lanes.pop(switches, None) or Lane(
                        switches, self._make_decoder(), self.ends, self.limit
                    )
                    self._lanes[switches] = lane  # the one that was used last is the last
                    lane.begin(completion, Chooser(request.sampling, request.top_logprobs))
                except Exception as error:  # this request's alone: no memory for its cache, say
                    completion.end(None, error)
            self._post([completion])

    def _advance(self, lane: Lane) -> None:
        if lane.is_idle:
            return
        try:
            self._parts.apply(lane.switches)
            self.tokens_generated += lane.advance()
        except Exception as error:  # the model's own: its cache may be anything now
            self._lanes.pop(lane.switches, None)
            for text in lane.texts.values():
                text.completion.end(None, error)

    def _drop_idle(self) -> None:
        """Give the memory of caches back that nobody has used for the longest time."""
        idle = [switches for switches, lane in self._lanes.items() if lane.is_idle and switches != AS_THE_FOLDER_SAYS]
        for switches in idle[: max(0, len(idle) - IDLE_LANES)]:
            del self._lanes[switches]

    def _post(self, completions: list[Completion]) -> None:
        for mailbox in {c.mailbox: None for c in completions if c.mailbox is not None}:
            mailbox.post()


def _decoding(model: Any, rows: int, length: int) -> tuple[Callable[[], RowDecoder], dict[str, Any]]:
    facts: dict[str, Any] = {"device": str(model.device), "limit": length, "rows": rows}
    try:
        own = BraidRows(model) if isinstance(model, BraidForCausalLM) else TransformersRows(model, length)
    except BraidError as error:
        facts |= {"rows": 1, "batching": f"one text after another: {error.what}"}
        return lambda: SingleText(lambda limit: TransformersDecoder(model, limit), length), facts
    return lambda: RowDecoder(own, rows, length), facts | {"batching": "texts join and leave at every step"}
