"""Requests that nobody would write: each has an answer or an end, none a traceback, and no row is lost."""

import json
import logging
import random
from typing import Any

import pytest

from braidlm.serving.api import connection
from tests.serving.servers import Running, until

REQUESTS = 500
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 5, 2**31, 2**63, 2**70, -0.0, 0.5, 1e308, 1e-320, "", "x", "w" * 300, "\ud800",
    "\x00", "</script>", "../../etc/passwd", "chat", "plain", [], [[]], [0], [1, 2, 257], [258], [-1], ["a",
    "b"], [None],
    [[1], [2]], [[1], "x"], {}, {"a": 1}, {"include_usage": True}, {"paths": ["maths"]}, {"paths": []},
    {"without": ["*"]},
    {"members": ["x"]}, {"gates_off": ["layer 1"]}, [{"role": "user", "content": "hi"}], [{"role": 1}], [{}] * 3,
]  # fmt: skip
KEYS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n",
    "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "ignore_eos", "return_token_ids",
    "braid", "user",
    "best_of", "suffix", "presence_penalty", "logit_bias", "tools", "response_format", "zzz", "__class__", "",
]  # fmt: skip
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/chat", "/v1/models/..%2f..%2fetc", "/health",
    "/metrics", "/docs", "/openapi.json", "/", "/static/page/..%2f..%2fapp.py", "/static/report/%00", "/%ff%fe",
    "//", "/v1/completions/",
    "*", "http://evil.example/", "/?" + "q" * 3000,
]  # fmt: skip
METHODS = ["POST"] * 6 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "x"]
HEADERS = [
    "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Authorization: Bearer \xe9",
    "Expect: 100-continue",
    "Origin: http://evil.example", "Origin: http://[", "Sec-Fetch-Site: cross-site", "Accept-Encoding: \x07",
    "Range: bytes=0-1,5-",
    "Connection: close", "Connection: upgrade", "Upgrade: websocket", "X: " + "y" * 9000, "Cookie: a=b; c",
    "Host: two", "If-None-Match: *",
    "Transfer-Encoding: chunked", "Content-Length: 3", "Content-Length: x", "Accept: text/html", "Sec-WebSocket-Key: a",
]  # fmt: skip


def body(rng: random.Random) -> bytes:
    """A body that is nearly right, or not at all."""
    if rng.random() < 0.15:
        return rng.choice(
            [rng.randbytes(rng.randrange(60)), b"[" * 3000, b'{"a":' * 900, b"null", b'{"model":"chat"', b"\xff{}"]
        )
    fields: dict[str, Any] = {"model": "chat", "prompt": "hi", "max_tokens": 3}
    if rng.random() < 0.3:
        fields = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        fields[rng.choice(KEYS)] = rng.choice(VALUES)
    return json.dumps(fields).encode()


def request(rng: random.Random) -> bytes:
    """The bytes of a request, damaged in places."""
    content = body(rng)
    path = rng.choice(PATHS[:2]) if rng.random() < 0.7 else rng.choice(PATHS)
    lines = [f"{rng.choice(METHODS)} {path} HTTP/1.{rng.choice('1111110')}"]
    if rng.random() < 0.95:
        lines.append(f"Host: {rng.choice(['localhost'] * 9 + ['evil.example'])}")
    if rng.random() < 0.9:
        lines.append("Content-Type: application/json")
    if rng.random() < 0.95:
        lines.append(f"Content-Length: {max(0, len(content) + rng.choice([0] * 40 + [1, -1, 50]))}")
    lines.append("Connection: close")
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        lines.append(rng.choice(HEADERS))
    data = "\r\n".join([*lines, "", ""]).encode("latin-1") + content
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(5)) + data[at + rng.randrange(3) :]
    return data[: rng.randrange(1, len(data))] if rng.random() < 0.03 else data


def ask(served: Running, data: bytes, reads: bool) -> bytes:
    """What a connection answers; without `reads` its client goes at once."""
    answer = b""
    with served.connect() as client:
        try:
            client.sendall(data)
            if reads:
                while part := client.recv(65536):
                    answer += part
        except OSError:
            pass
    return answer


@pytest.mark.parametrize("seed", range(5))
def test_odd_requests_get_an_answer_and_no_traceback(
    served: Running, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    rng = random.Random(seed)
    statuses: set[int] = set()
    with caplog.at_level(logging.ERROR):
        for _ in range(REQUESTS // 5):
            data = request(rng)
            answer = ask(served, data, reads=rng.random() < 0.9)
            assert b"Traceback" not in answer
            if answer:
                status = int(answer[9:12])
                statuses.add(status)
                assert status != 500, data
                if status >= 400 and not data.startswith(b"HEAD"):
                    assert b'{"error":{"message":' in answer, data
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert {200, 400} < statuses
    until(served.all_rows_are_free)
    assert served.post("/v1/completions", {"model": "chat", "prompt": "hi"}).status_code == 200
