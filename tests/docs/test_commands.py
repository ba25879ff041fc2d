"""Every command and example of the documentation that is marked for it does what the page says: it runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.kernels.lowerings import lowering
from braidlm.model.config.registry import PARTS, import_files
from tests.docs.marked_blocks import Block, marked_blocks

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if marked_blocks(page)]
FOR_THE_SHELL = set("|><&;$`(){}")
QUOTED = re.compile(r"""'[^']*'|"[^"$`]*\"""")


@pytest.fixture
def _own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page may write modules that register parts and lowerings, which other tests must not see."""
    import_files("braidlm.model")  # our own parts are registered once, and must be there after the page too
    for registry in PARTS.values():
        monkeypatch.setattr(registry, "parts", dict(registry.parts))
    monkeypatch.setattr(lowering, "LOWERINGS", dict(lowering.LOWERINGS))
    yield
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.usefixtures("_own_parts")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # a page may write a module and import it
    for block in marked_blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.body, where, "exec"), {"__name__": "__main__"})
        else:
            run_shell(block, where)


def run_shell(block: Block, where: str) -> None:
    """Plain `braid` lines in this process, where torch is loaded already; what needs a shell, in one."""
    assert block.language == "bash", f"{where}: only bash and python blocks can run"
    for line in block.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "braid" and not FOR_THE_SHELL & set(QUOTED.sub("", line)):
            assert main(words[1:]) == 0, f"{where}: {line}"
        else:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line],
                env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, f"{where}: {line}\n{done.stdout}\n{done.stderr}"


def test_the_tutorials_are_tested() -> None:
    tested = {page.relative_to(ROOT) for page in PAGES}
    assert {page.relative_to(ROOT) for page in (ROOT / "docs" / "tutorials").glob("*.md")} <= tested
    assert Path("docs/extend.md") in tested
