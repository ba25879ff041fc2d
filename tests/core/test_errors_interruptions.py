"""SIGTERM ends a command as Ctrl-C does: with a message, an exit code of its own, and nothing half-written."""

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from braidlm.cli import list as list_verb
from braidlm.cli.main import VERBS, main
from braidlm.core.errors import Terminated, until_stopped
from braidlm.core.files import atomic_folder, write_text


def raised_by(number: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


ENDS = [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
"""Signals with the exit code and the word of the command that they end."""


@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_a_command_ends_with_a_message_and_its_own_code(
    number: int, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(list_verb, "run", raised_by(number))
    assert main(["list", "recipes"]) == code
    assert capsys.readouterr().err == f"error: {word}\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    def write() -> int:
        with atomic_folder(tmp_path / "out") as folder:
            write_text(folder / "half", "written")
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert until_stopped(write) == 143
    assert list(tmp_path.iterdir()) == []


def test_what_catches_ctrl_c_catches_both() -> None:
    caught = []

    def work() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            caught.append(type(error))
        return 0

    assert (until_stopped(work), caught) == (0, [Terminated])


def test_in_another_thread_signals_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    thread = threading.Thread(target=until_stopped, args=[work])
    thread.start()
    thread.join()
    assert seen == [before]


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    """As shells start what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert until_stopped(lambda: raised_by(signal.SIGINT)() or 0) == 0
    finally:
        signal.signal(signal.SIGINT, before)


STOPPED_AT_AN_IMPORT = """
import os, sys
class SignalAtImport:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, SignalAtImport)
from braidlm.__main__ import main
sys.argv = ["braid", "list", "recipes"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["braidlm.cli.main", "braidlm.cli.list", "braidlm.core.recipes"])
@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_the_command_can_be_stopped_during_an_import(number: int, code: int, word: str, module: str) -> None:
    """At its first import, at the verb's and at one of the verb's work."""
    script = STOPPED_AT_AN_IMPORT.format(module=module, number=int(number))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {word}\n")


def test_an_import_that_catches_all_cannot_keep_a_command_from_ending(tmp_path: Path) -> None:
    """As numpy's does, of which half stays behind."""
    (tmp_path / "careless.py").write_text(
        "import os\ntry:\n    os.kill(os.getpid(), 15)\n    os.getpid()\nexcept BaseException:\n    pass\n"
    )
    script = "from braidlm.core.errors import until_stopped\nuntil_stopped(lambda: __import__('careless'))\n"
    code = f"import sys; sys.path.append({str(tmp_path)!r})\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, "error: terminated\n")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_every_verb_can_be_stopped_while_it_is_imported(
    number: int, code: int, word: str, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib, "import_module", raised_by(number))
    assert main([verb]) == code
    assert capsys.readouterr().err == f"error: {word}\n"


def test_little_is_imported_before_signals_are_caught() -> None:
    code = "import sys, braidlm.__main__; print({'argparse', 'rich', 'yaml', 'hydra', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
    script = Path("pyproject.toml").read_text().split("[project.scripts]\n")[1].splitlines()[0]
    assert script == 'braid = "braidlm.__main__:main"'
