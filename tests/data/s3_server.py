"""A stand-in for an S3 server: as much of the protocol as s3fs uses to read, write, list and remove plain objects.

Objects are in memory; what overrides `size` and `read` may make them up, so that a set can be larger than the disk.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "stand-in",
    "AWS_SECRET_ACCESS_KEY": "stand-in",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Store:
    """Objects by `bucket/key`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures: dict[str, int] = {}
        """How often the next requests for a key fail with 500."""
        self.requests: list[tuple[str, str]] = []

    def names(self) -> list[str]:
        return sorted(self.objects)

    def size(self, key: str) -> int | None:
        """The bytes of an object, or None."""
        data = self.objects.get(key)
        return None if data is None else len(data)

    def read(self, key: str, start: int, stop: int) -> bytes:
        return self.objects[key][start:stop]

    def tag(self, key: str) -> str:
        return md5(self.objects.get(key, key.encode())[:4096]).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fails(self, code: int, name: str) -> None:
        self.answer(code, f"<Error><Code>{name}</Code><Message>{name}</Message></Error>".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.store.requests.append((self.command, self.key))
        if self.store.failures.get(self.key, 0) > 0:
            self.store.failures[self.key] -= 1
            return self.fails(500, "InternalError")
        if "list-type=2" in self.path:
            return self.list()
        size = self.store.size(self.key)
        if size is None:
            in_bucket = any(key.startswith(f"{self.key}/") for key in self.store.names())
            return self.answer(200) if "/" not in self.key and in_bucket else self.fails(404, "NoSuchKey")
        start, stop, code = 0, size, 200
        if (asked := self.headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, code = int(first), min(int(last or size - 1) + 1, size), 206
        headers = {"ETag": f'"{self.store.tag(self.key)}"', "Last_Modified": formatdate(0, usegmt=True)}
        headers |= {"Content_Range": f"bytes {start}-{stop - 1}/{size}"} if code == 206 else {}
        body = b"" if self.command == "HEAD" else self.store.read(self.key, start, stop)
        return self.answer(code, body, **headers, Content_Length=str(stop - start))

    def list(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        bucket, prefix, end = self.key, query.get("prefix", ""), query.get("delimiter")
        found, folders = "", set()
        for key in self.store.names():
            name = key.removeprefix(f"{bucket}/")
            if key == name or not name.startswith(prefix):
                continue
            if end and end in name[len(prefix) :]:
                folders.add(prefix + name[len(prefix) :].partition(end)[0] + end)
                continue
            found += f"<Contents><Key>{escape(name)}</Key><Size>{self.store.size(key)}</Size>"
            found += (
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{self.store.tag(key)}</ETag></Contents>"
            )
        found += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        if not any(key.startswith(f"{bucket}/") for key in self.store.names()):
            return self.fails(404, "NoSuchBucket")
        head = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated><Prefix>{escape(prefix)}</Prefix>"
        return self.answer(200, f"<ListBucketResult>{head}{found}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        self.store.requests.append((self.command, self.key))
        self.store.objects[self.key] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200, ETag=f'"{self.store.tag(self.key)}"')

    def do_DELETE(self) -> None:
        self.store.objects.pop(self.key, None)
        self.answer(204)


@contextmanager
def s3_server(store: Store) -> Iterator[dict[str, str]]:
    """The environment with which s3fs finds the server, which is set for this process too."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"store": store}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        yield environment
    finally:
        server.shutdown()
        server.server_close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
