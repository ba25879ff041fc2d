"""Slow clients, and what is no HTTP."""

import json

import pytest

from braidlm.serving.api import connection
from tests.serving.servers import Running, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_head_that_drips_ends_its_connection(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    with served.connect() as silent, served.connect() as dripping:
        dripping.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        for each in (silent, dripping):
            each.settimeout(30)
            assert each.recv(100) == b""


def test_a_client_that_reads_nothing_is_dropped_and_its_rows_return(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are larger than what the system's buffers take."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    prompts = ["x" * 90] * 32
    body = {"model": "chat", "prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    data = json.dumps(body).encode()
    before = len(served.server.server_state.connections)
    with served.connect() as client:
        client.setsockopt(1, 8, 4096)  # SO_RCVBUF
        client.sendall((HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data) * 8)
        until(lambda: len(served.server.server_state.connections) <= before)
    until(served.all_rows_are_free)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"GARBAGE\r\n\r\n", b"GET / HTTP/x\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"]
)  # fmt: skip
def test_what_is_no_http_gets_one_answer(served: Running, sent: bytes) -> None:
    with served.connect() as client:
        client.sendall(sent + b"\r\n\r\n")
        answer = b""
        while part := client.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_several_requests_on_one_connection(served: Running) -> None:
    with served.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answer = b""
        while answer.count(b'"status":"ok"') < 3:
            answer += client.recv(4096)
    assert answer.count(b"HTTP/1.1 200") == 3
