"""Who may ask, and how much: strangers' pages, keys, and bodies without end."""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from braidlm.serving.api.safety import Limits, known_hosts
from tests.serving.servers import Running, running

KEY = "a-secret-key"
PAGES = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("", "a@127.0.0.1", "[::1", "0x7f.1"),
    ],
)
def test_a_name_that_leads_here_by_dns_is_refused(served: Running, host: str) -> None:
    answer = httpx.get(f"{served.url}/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "10.0.0.7"])
def test_our_own_names_and_addresses_are_known(served: Running, host: str) -> None:
    assert httpx.get(f"{served.url}/health", headers={"Host": host}).status_code == 200


def test_two_hosts_are_refused(served: Running) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
    ids=str,
)
def test_another_sites_page_reaches_nothing(served: Running, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("OPTIONS", "/v1/completions")):
        answer = httpx.request(method, f"{served.url}{path}", headers=headers)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_our_own_page_and_links_to_it_are_let_in(served: Running) -> None:
    own = {"Origin": served.url, "Sec-Fetch-Site": "same-origin"}
    assert httpx.get(f"{served.url}/v1/models", headers=own).status_code == 200
    linked = PAGES | {"Sec-Fetch-Site": "cross-site"}
    assert httpx.get(f"{served.url}/docs", headers=linked).status_code == 200
    assert httpx.post(f"{served.url}/v1/completions", headers=linked).status_code == 403


def test_a_form_of_another_page_is_no_json(served: Running) -> None:
    """A browser sends these types across sites without asking the server first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = httpx.post(
            f"{served.url}/v1/completions", content=b'{"model": "chat"}', headers={"Content-Type": kind}
        )
        assert answer.status_code == 415


def test_every_answer_has_the_headers_that_hold_a_page(served: Running) -> None:
    for path in ("/health", "/nothing", "/v1/models", "/docs"):
        headers = httpx.get(f"{served.url}{path}").headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    assert "sandbox" in headers["content-security-policy"]


def test_a_large_body_is_refused_before_it_is_read(served: Running) -> None:
    with served.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100000000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_without_a_length_is_refused_early(served: Running) -> None:
    sent = 0
    with served.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 100_000_000:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
        except OSError:
            pass
    assert sent < 20_000_000  # what the system's buffers took


def test_a_body_that_is_too_large_is_told_to_clients(served: Running) -> None:
    answer = served.post("/v1/completions", {"model": "chat", "prompt": "x" * 300_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_drips_is_refused(served: Running) -> None:
    with served.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.fixture(scope="module")
def locked(plain_model: Path) -> Iterator[Running]:
    """A server that wants a key."""
    with running([plain_model], api_key=KEY) as server:
        yield server


def test_a_key_lets_clients_in(locked: Running) -> None:
    assert locked.client(KEY).models.list().data[0].id == "plain"
    for wrong in ("", "a-secret-kez", KEY + "x", "ключ"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            locked.client(wrong or "x").models.list()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/docs", "/openapi.json", "/nothing", "/static/../metrics"])
def test_nothing_is_told_without_the_key(locked: Running, path: str) -> None:
    answer = httpx.get(f"{locked.url}{path}")
    assert answer.status_code in (401, 404)
    assert "braid_" not in answer.text
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_a_browser_asks_for_the_key_by_itself_where_a_page_is_opened(locked: Running) -> None:
    opened = httpx.get(f"{locked.url}/docs", headers=PAGES)
    assert opened.headers["www-authenticate"].startswith("Basic")
    assert "www-authenticate" not in httpx.get(f"{locked.url}/v1/models").headers
    secret = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    assert httpx.get(f"{locked.url}/docs", headers={"Authorization": f"Basic {secret}"}).status_code == 200
    for wrong in ("Basic !!!", "Basic", "Basic YQ==", f"Digest {KEY}", KEY, "Bearer"):
        assert httpx.get(f"{locked.url}/docs", headers={"Authorization": wrong}).status_code == 401


def test_names_of_this_machine_are_known_where_it_is_reached_from_elsewhere() -> None:
    assert known_hosts("127.0.0.1") == {"localhost"}
    assert known_hosts("0.0.0.0", ["Models.example.org"]) > {"localhost", "models.example.org"}


def test_limits_have_ranges() -> None:
    assert Limits().max_body == 4_000_000
