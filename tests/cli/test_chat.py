"""`braid chat` end to end: on a terminal (a pty), and with prompts from a pipe."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from braidlm.cli import main as command
from tests.outcome import Outcome
from tests.serving.servers import save_chat_model

SECONDS = 120
CONTEXT = 8192
"""An answer that long takes seconds: there is time to stop it."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model") / "chat", context=CONTEXT)


class Terminal:
    """A program on a terminal, and what it has written."""

    def __init__(self, *command: object):
        master, own = pty.openpty()
        self.master, self.text = master, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "braidlm", *map(str, command)],
            stdin=own, stdout=own, stderr=own, env=ENVIRONMENT, start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(own)

    def type(self, text: str) -> None:
        """What the user types; Ctrl-C is a signal by the terminal's own settings."""
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at the prompt, until there is a new one: Python's readline misses a signal that comes just before it
        waits for a key (its `select` then sees the next one alone)."""
        self.type("\x03")
        self.wait_for("> ", meanwhile=lambda: self.type("\x03"))

    def wait_for(self, text: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Everything up to a text, which is then read; `meanwhile` is done after each few seconds without a word."""
        end = time.monotonic() + SECONDS
        while text not in self.text:
            assert time.monotonic() < end, self.text
            if not select.select([self.master], [], [], 5.0)[0]:
                meanwhile()
            else:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    pytest.fail(f"ended: {self.text}")
        before, _, self.text = self.text.partition(text)
        return before


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore it


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", folder, "--greedy", "--device", "cpu")
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    assert "Ctrl+C stops an answer" in terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt()
    terminal.type("/resett\n")
    assert "Did you mean '/reset'?" in terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\n")
    terminal.wait_for("�")  # the model's text comes
    terminal.type("\x03")
    rest = terminal.wait_for("\n> ")
    assert len(rest) < CONTEXT
    assert "limit" not in rest
    assert not [one for one in rest if ord(one) < 32 and one not in "\r\n\t"]
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0


@pytest.fixture
def chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`braid chat` in this process, with prompts from a pipe."""
    monkeypatch.setattr(command, "VERBS", ("chat",))

    def run(text: bytes, *options: str) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        code = command.main(["chat", str(folder), "--greedy", "--device", "cpu", *options])
        return Outcome(code, *capsys.readouterr())

    return run


def test_each_line_of_a_pipe_is_a_prompt(chat: Callable[..., Outcome]) -> None:
    done = chat(b"hello\n\n/system You are x.\nand?\r\nlast", "--max-tokens", "4", "--json")
    assert done.code == 0, done.err
    answers = json.loads(done.out)["answers"]
    assert [answer["prompt"] for answer in answers] == ["hello", "and?", "last"]
    assert all(answer["text"] and answer["stopped"] == "max_tokens" for answer in answers)
    shown = chat(b"hello\n", "--max-tokens", "4")
    assert shown.out == answers[0]["text"] + "\n"


def test_a_pipe_that_is_no_text_is_an_error(chat: Callable[..., Outcome]) -> None:
    done = chat(b"\xff\xfe\n")
    assert (done.code, done.out) == (2, "")
    assert "not UTF-8" in done.err


def test_an_unknown_command_is_an_error_where_nobody_can_correct_it(chat: Callable[..., Outcome]) -> None:
    done = chat(b"/sistem You are x.\nhello\n")
    assert (done.code, done.out) == (2, "")
    assert "Did you mean '/system'?" in done.err
