"""Connections that hold nobody up: heads that drip, readers that do not read, and what is no HTTP at all."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from braidlm.serving.api.errors import ApiError

HEAD_SECONDS = 15.0
"""How long a request line and its headers may take, and a connection may wait for the next."""
STALL_SECONDS = 30.0
"""How long a client may read nothing of what was sent to it."""


class Connection(H11Protocol):
    """uvicorn's connection with two more timers."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self._head is not None and self.cycle is not None and not self.cycle.response_complete:
            self._head.cancel()
            self._head = None

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """In OpenAI's shape; where an answer has begun already, the connection only ends."""
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            answer = ApiError(400, "this is no valid HTTP request").response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
