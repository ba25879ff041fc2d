"""Who may ask, and how much: Host, Origin, the API key, the size of bodies, and the headers of every response."""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from braidlm.model.config.ranges import Count, Positive
from braidlm.serving.api.errors import ApiError
from braidlm.serving.api.metrics import Metrics

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""A report is a page of its own, whoever wrote it: it gets no origin, so that it reaches nothing of the server."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
OPEN = ("/", "/health")
"""What needs no key, beside the page's own files: nothing in them is of a model."""
STATIC = "/static/"
_HOST = re.compile(r"(?P<name>[\w.-]+|\[[0-9a-f:.]+\])(:\d+)?")


@dataclass(frozen=True)
class Limits:
    """What one client can ask for at most."""

    max_body: Count = 4_000_000
    """Bytes of a request's body."""
    max_seconds: Positive = 600.0
    """Seconds until a text ends where it is."""
    body_seconds: Positive = 30.0
    """Seconds that a body may take to arrive."""


def is_loopback(host: str) -> bool:
    """Whether an address is only reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def known_hosts(host: str, others: Iterable[str] = ()) -> frozenset[str]:
    """The names that a server is reached by: the machine's own only where it is reached from elsewhere."""
    own = () if is_loopback(host) else (host, socket.gethostname(), socket.getfqdn())
    return frozenset(name.lower() for name in ("localhost", *own, *others) if name)


class Guard:
    """Stands before an app: refuses strangers and bodies without end, counts requests, and adds headers."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, limits: Limits, api_key: str | None = None, hosts: Collection[str] = ()
    ):
        self.app, self.metrics, self.limits = app, metrics, limits
        self.key = None if api_key is None else api_key.encode()
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499  # as nginx counts a client that went before it had an answer

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            await self.app(scope, self._bounded(headers, receive), send_safely)
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # what remains of the body is not read
            await response(scope, receive, send_safely)
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            self.metrics.count_request(getattr(route, "path", "other"), status)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._knows(host):
            what = f"this server is not reached as '{host[:200]}'; `braid serve --host-name NAME` adds a name"
            raise ApiError(403, what, code="unknown_host")
        if not _same_site(scope, headers, host):
            raise ApiError(403, "another site's page may not use this server", code="cross_site")
        is_open = scope["path"] in OPEN or scope["path"].startswith(STATIC)
        if self.key is not None and not is_open and not self._has_key(headers):
            asks = headers.get("sec-fetch-mode") == "navigate"  # a browser can ask for it by itself
            basic = {"WWW-Authenticate": 'Basic realm="braid"'} if asks else {}
            what = "this server wants its API key: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key", headers=basic)
        length = headers.get("content-length", "0")
        if len(length) > 18 or int(length) > self.limits.max_body:
            self._too_large()

    def _knows(self, host: str) -> bool:
        """Addresses are always known: only a name can be made to lead here by a stranger."""
        if (name := _HOST.fullmatch(host.lower())) is None:
            return False
        try:
            ipaddress.ip_address(name["name"].strip("[]"))
        except ValueError:
            return name["name"] in self.hosts
        return True

    def _has_key(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip().encode("latin-1")
        if kind.lower() == "basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        assert self.key is not None
        return kind.lower() in ("bearer", "basic") and hmac.compare_digest(secret, self.key)

    def _too_large(self) -> None:
        what = f"the body is larger than {self.limits.max_body:,} bytes"
        raise ApiError(413, what, code="body_too_large", headers={"Connection": "close"})

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """Refuses a body once it is too large, or takes too long; its length may not be known before."""
        loop = asyncio.get_running_loop()
        received, ends_at, complete = 0, loop.time() + self.limits.body_seconds, False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(ends_at):
                    message = await receive()
            except TimeoutError:
                what = f"the body did not arrive within {self.limits.body_seconds:g} seconds"
                raise ApiError(408, what, headers={"Connection": "close"}) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self.limits.max_body:
                self._too_large()
            return message

        return bounded


def _same_site(scope: Scope, headers: Headers, host: str) -> bool:
    """Whether a request is a program's or our own page's; a link from elsewhere may open a page."""
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host.lower():
        return False
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return True
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens and scope["method"] == "GET" and origin is None
