"""Several processes that want the same data: one prepares it, and the others take it when it is finished."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.packing.workers import work_folder

pytest.importorskip("fcntl")

OPEN = """
import json, sys
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.open_data import open_data
from braidlm.model.config.strict import decode
data = open_data(decode(DataConfig, json.loads(sys.argv[1])))
print(len(data.train[0]), data.tokenizer.fingerprint)
"""


def test_processes_that_start_together_prepare_once(tmp_path: Path) -> None:
    """They train one tokenizer and pack once, and all read the same."""
    source = {"source": "stories", "documents": 300, "holdout": 0.1}
    config = {
        "sets": {"a": source},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "cache": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", OPEN, json.dumps(config)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [process.communicate(timeout=120) for process in started]
    assert [errors for _, errors in ended] == ["", "", ""]
    assert [process.returncode for process in started] == [0, 0, 0]
    said = [output.splitlines() for output, _ in ended]
    assert len({lines[-1] for lines in said}) == 1
    everything = [line for lines in said for line in lines]
    assert sum("Training a tokenizer" in line for line in everything) == 1
    assert sum(any("packing: " in line for line in lines) for lines in said) == 1
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_folder_that_its_holder_removed_is_locked_anew(tmp_path: Path) -> None:
    """The lock that was waited for is then that of a file which no longer exists."""
    inside, entered, order = threading.Event(), threading.Event(), []

    def second() -> None:
        inside.wait()
        with work_folder(tmp_path / "out", "key", wait=True) as folder:
            order.append("second")
            with pytest.raises(BraidError, match="is at work here"), work_folder(tmp_path / "out", "key"):
                pytest.fail("the folder is locked")
            assert (folder / "key").read_text() == "key"
        entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    with work_folder(tmp_path / "out", "key"):
        inside.set()
        assert not entered.wait(0.6)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not (tmp_path / "out.part").exists()


def test_a_killed_holder_is_not_waited_for(tmp_path: Path) -> None:
    holder = "import os, sys; from pathlib import Path; from braidlm.data.packing.workers import work_folder\n"
    holder += f"with work_folder(Path(sys.argv[1]), 'key'): os.kill(os.getpid(), {signal.SIGKILL:d})"
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", holder, str(out)]).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["out.part"]
    with work_folder(out, "key") as folder:
        assert (folder / "key").read_text() == "key"
