"""Requests for text: submitted to an engine, gathered into one answer or streamed as server-sent events."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from braidlm.core.errors import BraidError
from braidlm.serving.api.bodies import GenerationBody
from braidlm.serving.api.errors import SERVER_ERROR, ApiError, as_api_error
from braidlm.serving.api.metrics import Metrics
from braidlm.serving.api.texts import Entry, GrowingText, Piece, TokenTexts
from braidlm.serving.engine import Completion, Engine, Request

T = TypeVar("T")
LOG = logging.getLogger(__name__)
_to_json = json.JSONEncoder(separators=(",", ":")).encode
REASONS = {"end": "stop", "max_tokens": "length", "limit": "length"}


@dataclass
class Prompt:
    """The tokens of a prompt, and its text where it is told."""

    ids: tuple[int, ...]
    text: str = ""


@dataclass
class Choice:
    """One continuation of a prompt."""

    index: int
    prompt: Prompt
    completion: Completion
    text: GrowingText
    tokens: int = 0
    """How many have come, the end of text included."""
    reason: str | None = None
    has_begun: bool = False
    """Whether the client has been told some of the text."""

    async def pieces(self, ends: frozenset[int], metrics: Metrics, model: str) -> AsyncIterator[Piece]:
        """What is new each time; the last piece is what was held back, when the reason is known."""
        started = before = time.perf_counter()
        async for tokens in self.completion.tokens():
            if self.text.stopped:
                continue
            now = time.perf_counter()
            metrics.count_tokens(model, len(tokens), now - before, None if self.tokens else now - started)
            before = now
            self.tokens += len(tokens)
            yield self.text.add(tokens, ends)
            if self.text.stopped:
                self.completion.cancel()
        if not self.tokens and self.completion.stopped == "cancelled":
            raise ApiError(503, "the server was too busy to begin this text in time; try again later")
        last = self.text.finish()
        self.reason = "stop" if self.text.stopped else REASONS.get(self.completion.stopped or "", "length")
        yield last


@dataclass
class Generation:
    """All choices of one request."""

    body: GenerationBody
    engine: Engine
    texts: TokenTexts
    metrics: Metrics
    prompts: list[Prompt]
    choices: list[Choice] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    """What every part of the answer begins with."""

    def submit(self, max_tokens: int, top_logprobs: int | None, prompt_logprobs: bool, echoes: bool) -> None:
        """Hand all choices to the engine, or none of them where too many wait."""
        body, tokenizer = self.body, self.engine.tokenizer
        switches = body.braid.switches()
        try:
            for index in range(len(self.prompts) * body.n):
                prompt = self.prompts[index // body.n]
                sampling = body.sampling(index % body.n)
                request = Request(
                    prompt.ids, max_tokens, sampling, switches, top_logprobs, prompt_logprobs, body.ignore_eos
                )
                begin = len(prompt.text) if echoes else 0
                text = GrowingText(tokenizer, prompt.ids, body.stops, begin, top_logprobs is not None)
                self.choices.append(Choice(index, prompt, self.engine.submit(request), text))
        except BaseException:
            self.cancel()
            raise
        self.metrics.count_prompts(body.model, sum(len(prompt.ids) for prompt in self.prompts))

    def cancel(self) -> None:
        """Give all rows back."""
        for choice in self.choices:
            choice.completion.cancel()

    @contextmanager
    def within(self, seconds: float) -> Any:
        """At the end of the block, or after so many seconds, no text of the request runs any more."""
        timer = asyncio.get_running_loop().call_later(seconds, self.cancel)
        try:
            yield
        finally:
            timer.cancel()
            self.cancel()

    def pieces(self, choice: Choice) -> AsyncIterator[Piece]:
        """What a choice gains."""
        ends = frozenset() if self.body.ignore_eos else self.engine.ends
        return choice.pieces(ends, self.metrics, self.body.model)

    def listed_ids(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The ids of tokens, where they are asked for."""
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": piece.ids} | ({} if choice.has_begun else {"prompt_token_ids": list(choice.prompt.ids)})

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and written."""
        read, written = sum(len(p.ids) for p in self.prompts), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def begin(self, prefix: str, kind: str) -> None:
        """Give the answer a name and a time."""
        made = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time())}
        self.head = {**made, "model": self.body.model}

    async def whole(self, choice: Choice) -> Piece:
        """All pieces of a choice as one."""
        text: list[str] = []
        ids: list[int] = []
        entries: list[Entry] = []
        async for piece in self.pieces(choice):
            text.append(piece.text)
            ids += piece.ids
            entries += piece.entries
        return Piece("".join(text), ids, entries)

    async def gather(self, tell: Callable[[Choice, Piece], dict[str, Any]], seconds: float) -> dict[str, Any]:
        """The whole answer, once all choices have ended."""
        with self.within(seconds):
            pieces = await all_of(*(self.whole(choice) for choice in self.choices))
        told = [tell(choice, piece) for choice, piece in zip(self.choices, pieces, strict=True)]
        return {**self.head, "choices": told, "usage": self.usage}

    async def stream(
        self, first: Callable[[Choice], dict[str, Any] | None], tell: Callable[[Choice, Piece], dict[str, Any]],
        seconds: float, send: Callable[[bytes], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Server-sent events, as many tokens in each as there are when it is sent."""
        usage = {"usage": None} if self.body.sends_usage else {}

        async def event(*choices: dict[str, Any], **more: Any) -> None:
            await send(sse({**self.head, "choices": choices, **usage, **more}))

        async def run(choice: Choice) -> None:
            if (opening := first(choice)) is not None:
                await event(opening)
            async for piece in self.pieces(choice):
                if piece.text or piece.ids or piece.entries or choice.reason:
                    await event(tell(choice, piece))
                    choice.has_begun = True

        try:
            with self.within(seconds):
                await all_of(*map(run, self.choices))
            if self.body.sends_usage:
                await event(usage=self.usage)
        except (ApiError, BraidError) as error:
            await send(sse(as_api_error(error).body))
        except Exception:
            LOG.exception("a text ended with an error")
            await send(sse(ApiError(500, SERVER_ERROR).body))
        await send(b"data: [DONE]\n\n")


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _to_json(data).encode() + b"\n\n"


async def all_of(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all; the first error ends the others and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None
    return [task.result() for task in tasks]


class EventStream(Response):
    """A response that is written as it is made, until its client has gone."""

    media_type = "text/event-stream"

    def __init__(self, write: Callable[[Callable[[bytes], Awaitable[None]]], Coroutine[Any, Any, None]]):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def chunk(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self.write(chunk)
            await chunk(b"", more=False)

        await while_connected(receive, respond())


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of work that is cancelled when its client goes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
