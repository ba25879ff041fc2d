"""`braid serve` as a process: addresses, keys, and a clean stop."""

import json
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import braidlm
from braidlm.cli import serve as verb
from braidlm.core.errors import BraidError
from braidlm.serving import serve as module
from tests.outcome import Outcome
from tests.serving.servers import save_chat_model, until
from tests.training.forked_runs import ForkedRun, fork


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model") / "chat")


@contextmanager
def process(screen: Path, *arguments: str | Path) -> Iterator[tuple[ForkedRun, dict[str, Any]]]:
    """`braid serve` in a process of its own, and what it says when it has started."""
    served = fork(screen, "serve", *arguments, "--port", "0", "--json", "--device", "cpu")
    try:
        until(lambda: "}\n" in screen.read_text() or not served.is_alive(), seconds=200)
        said = screen.read_text()
        assert served.is_alive(), said
        facts, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
        yield served, facts
    finally:
        served.kill()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_end(model: Path, kind: signal.Signals, tmp_path: Path) -> None:
    with process(tmp_path / "screen", model) as (served, facts):
        assert facts["models"] == ["chat"]
        assert facts["url"].startswith("http://127.0.0.1:")
        body = {
            "model": "chat",
            "prompt": "x",
            "max_tokens": 90,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", f"{facts['url']}v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            events = [next(lines)]
            served.send(kind)
            events += [line for line in lines if line.startswith("data: {")]
        tokens = [token for line in events for token in json.loads(line[6:])["choices"][0]["token_ids"]]
        assert len(tokens) == 90
        assert "Traceback" not in served.finish()


def test_requests_that_take_too_long_are_cancelled_at_a_stop(model: Path, tmp_path: Path) -> None:
    with process(tmp_path / "screen", model, "--drain", "1", "--rows", "1") as (served, facts):
        body = {"model": "chat", "prompt": ["x"] * 200, "max_tokens": 90, "ignore_eos": True}
        with socket.create_connection(("127.0.0.1", int(facts["url"].rsplit(":")[-1].strip("/")))) as client:
            data = json.dumps(body).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
            )
            while '_running{model="chat"} 1.0' not in httpx.get(f"{facts['url']}metrics").text:
                pass
            served.terminate()
            served.finish()


def test_streams_that_a_stop_cuts_off_get_an_end(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "chat", context=100_000)
    with process(tmp_path / "screen", model, "--drain", "1") as (served, facts):
        body = {"model": "chat", "prompt": "x", "max_tokens": 90_000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{facts['url']}v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send(signal.SIGINT)
            *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in served.finish()


def test_a_port_that_is_taken_is_told_before_models_are_loaded(model: Path, braid: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = braid("serve", model, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "--port" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "no.such.host.invalid", "--api-key", "k"], "no address"),
        (["--port", "99999"], "99999"),
        (["--api-key", "two words"], "without spaces"),
    ],
)
def test_what_cannot_be_served_is_a_plain_error(
    model: Path, braid: Callable[..., Outcome], arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(module.KEY, raising=False)
    done = braid("serve", model, *arguments)
    assert done.code == 2
    assert words in done.err


def test_a_missing_extra_says_how_to_get_it(
    model: Path, braid: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("braidlm.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = braid("serve", model)
    assert (done.code, "pip install 'braidlm[serve]'" in done.err) == (2, True)


def test_a_damaged_model_is_told_and_nothing_is_served(tmp_path: Path, braid: Callable[..., Outcome]) -> None:
    folder = save_chat_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nothing")
    done = braid("serve", folder, "--port", 0, "--device", "cpu")
    assert (done.code, "Traceback" in done.err) == (2, False)


def test_the_function_tells_its_address_and_opens_the_page(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key comes from the environment; a signal in this process ends it."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv(module.KEY, "secret")
    addresses: list[module.Address] = []

    def on_start(address: module.Address) -> None:
        addresses.append(address)
        os.kill(os.getpid(), signal.SIGINT)

    braidlm.serve(model, host="0.0.0.0", port=0, device="cpu", open_page=True, on_start=on_start)
    assert addresses[0].has_key
    assert addresses[0].url.startswith("http://localhost:")
    assert opened == [addresses[0].url]
    assert "Stopping" in capsys.readouterr().out


def test_what_the_command_says(monkeypatch: pytest.MonkeyPatch, braid: Callable[..., Outcome], tmp_path: Path) -> None:
    def served(**options: Any) -> None:
        assert options["limits"].max_body == 5
        assert options["limits"].max_seconds == 600
        names = tuple(f"m{i}" for i in range(25))
        options["on_start"](module.Address("http://127.0.0.1:8000/", names, False))

    monkeypatch.setattr(module, "serve", served)
    said = braid("serve", tmp_path, tmp_path, "--max-body", 5).out
    for words in ("The page: http://127.0.0.1:8000/", "/v1 (without an API key)", "m19 and 5 more", "Ctrl+C stops it."):
        assert words in said
    assert json.loads(braid("serve", tmp_path, "--max-body", 5, "--json").out)["api_key"] is False
    assert verb.HELP


def test_the_key_is_needed_elsewhere_than_here() -> None:
    for host in ("127.0.0.1", "127.0.0.5", "::1", "localhost"):
        module._check_key(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(BraidError, match="API key"):
            module._check_key(host, None)
