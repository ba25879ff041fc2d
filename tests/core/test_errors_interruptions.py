"""SIGTERM ends a command as Ctrl-C does: with a message, an exit code of its own, and nothing half-written."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from braidlm.cli import list as list_verb
from braidlm.cli.main import main
from braidlm.core.errors import Terminated, exit_code, terminable
from braidlm.core.files import atomic_folder, write_text


def raised_by(number: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_command_ends_with_a_message_and_its_own_code(
    number: int, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(list_verb, "run", raised_by(number))
    assert main(["list", "recipes"]) == code
    assert capsys.readouterr().err == f"error: {word}\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    def write() -> None:
        with terminable(), atomic_folder(tmp_path / "out") as folder:
            write_text(folder / "half", "written")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_catches_ctrl_c_catches_both() -> None:
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert (exit_code(Terminated), exit_code(KeyboardInterrupt)) == (143, 130)


def test_in_another_thread_signals_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with terminable():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
