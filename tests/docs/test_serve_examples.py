"""The examples of docs/serve.md, sent to a server with a model of the name that they use."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")

from tests.end_to_end.page_server import page_server, save_models

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = re.findall(r"^curl .*?[^\\]$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    paths, *_ = save_models(folder)
    with page_server([paths.rename(folder / "composed")]) as url:
        yield url


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are for curl")
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_is_answered(url: str, command: str) -> None:
    assert ADDRESS in command
    shell = ["bash", "-euc", command.replace("curl ", "curl -sS --fail-with-body ").replace(ADDRESS, url)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "error" not in json.loads(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs(url: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="the example is for OpenAI's client")
    exec(compile(program.replace(ADDRESS, url), "docs/serve.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("composed\n")


def test_there_are_examples() -> None:
    assert len(COMMANDS) >= 10
    assert PROGRAMS
