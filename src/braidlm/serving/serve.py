"""`braid serve` as a function: models, an address, and a clean stop."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.opening.names import StrPath
from braidlm.serving.api.app import create_app
from braidlm.serving.api.connection import Connection
from braidlm.serving.api.safety import Limits, is_loopback, known_hosts
from braidlm.serving.inspect.folders import ServedFolders
from braidlm.serving.inspect.router import router
from braidlm.serving.models import ServedModels

KEY = "BRAID_API_KEY"
"""The environment variable that has the API key."""
LAST_EVENTS = 5
"""Seconds that clients have to read the end of an answer that a stop has cut off."""
BACKLOG = 512
"""Connections that the system lets wait until they are accepted."""


@dataclass(frozen=True)
class Address:
    """Where a server is reached."""

    url: str
    """The address of the page; the API is under /v1."""
    models: tuple[str, ...]
    has_key: bool


def serve(
    models: StrPath | Sequence[StrPath],
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    host_names: Sequence[str] = (),
    rows: int = 64,
    length: int | None = None,
    waiting: int = 256,
    keep: int | None = None,
    limits: Limits | None = None,
    drain: float = 30.0,
    device: str = "auto",
    open_page: bool = False,
    on_start: Callable[[Address], None] | None = None,
) -> None:
    """Serve models until Ctrl+C or SIGTERM: OpenAI's API, and a page to look inside.

    `models` are model folders, runs, studies, folders of these, or ORG/NAME on the Hub. Port 0 is any free one. `rows`
    texts of at most `length` tokens are continued at once, `waiting` more may wait, and `keep` models stay in memory.
    The key is that of `api_key` or of BRAID_API_KEY; running requests have `drain` seconds to end at a stop.
    """
    api_key = api_key or os.environ.get(KEY) or None
    _check_key(host, api_key)
    served = ServedModels(models, device, rows, length, waiting, keep)
    app = create_app(served, (router(served, ServedFolders(models)),), limits, api_key, known_hosts(host, host_names))
    listener = _listen(host, port)
    shown = "localhost" if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
    address = Address(url, tuple(served.served), api_key is not None)

    def started() -> None:
        if on_start is not None:
            on_start(address)
        if open_page:
            webbrowser.open(url)

    with contextlib.closing(listener):
        asyncio.run(_run(app, served, listener, drain, started))


def _check_key(host: str, api_key: str | None) -> None:
    if api_key is None and not is_loopback(host):
        todo = (
            f"Give a key (--api-key KEY, or {KEY} in the environment), or leave out --host: then only this machine can."
        )
        raise BraidError("without an API key everybody who reaches this machine could use the server", host, todo)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise BraidError("an API key is printable ASCII without spaces", todo="`openssl rand -hex 24` makes one.")


def _listen(host: str, port: int) -> socket.socket:
    """The socket that a server accepts connections from; errors are told before any model is loaded."""
    if not 0 <= port <= 65535:
        raise BraidError(f"ports are numbers from 0 to 65535, and this is {port}", host, "Use 0 for any that is free.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise BraidError(f"this is no address to listen at ({error})", host, "Use 127.0.0.1, or 0.0.0.0.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        todo = "Another program may use it: choose another with --port, or 0 for any that is free."
        raise BraidError(f"cannot listen there ({error.strerror})", f"{host}:{port}", todo) from None
    return listener


def make_server(app: FastAPI, drain: float) -> uvicorn.Server:
    """uvicorn's server with our connections; signals are left to the caller."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=round(drain) + LAST_EVENTS,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_told)
    return uvicorn.Server(config)


def _is_told(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is for the terminal: not what clients did wrong, nor where a stop cut them off."""
    return record.levelno >= logging.ERROR and (record.exc_info or (None,))[0] is not asyncio.CancelledError


async def _run(
    app: FastAPI, models: ServedModels, listener: socket.socket, drain: float, started: Callable[[], None]
) -> None:
    """Load what is named, then serve until a signal."""
    try:
        await models.open_named()
    except BaseException:
        await models.close()
        raise
    server = make_server(app, drain)
    closing: list[asyncio.Task[None]] = []

    def end_texts() -> None:
        """Let all texts end where they are, so that every client gets the end of its answer."""
        closing.append(asyncio.create_task(models.close()))

    def stop() -> None:
        if closing:
            server.force_exit = True
        elif server.should_exit:
            end_texts()
        else:
            console.say("Stopping: running requests may end (Ctrl+C again: at once).")
            asyncio.get_running_loop().call_later(drain, end_texts)
        server.should_exit = True

    with _signals(stop):
        serving = asyncio.ensure_future(server._serve([listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        started()
        await serving


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl+C and SIGTERM call `stop` in the event loop; outside of the main thread signals stay as they are."""
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM)
    try:
        for kind in kinds:
            loop.add_signal_handler(kind, stop)
    except (ValueError, RuntimeError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)
