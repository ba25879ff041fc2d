"""Every command and example of the documentation that is marked for it does what the page says: it runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braidlm.cli.main import main
from braidlm.kernels.lowerings import lowering
from braidlm.model.config.registry import PARTS, import_files
from braidlm.training import train as training
from braidlm.training.recipe import LoadedRecipe
from tests.docs.marked_blocks import Block, marked_blocks
from tests.warm_python import warm_python

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


@pytest.fixture
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's trainings last a few steps: they read little text, score little and write short samples."""
    train = training._train

    def train_on_little(loaded: LoadedRecipe, *others: Any) -> training.Run:
        recipe = loaded.recipe
        recipe.validation.tokens = min(recipe.validation.tokens or 500, 500)
        if recipe.samples.prompts:
            recipe.samples.tokens = 4
        for name, one in recipe.data.sets.items():
            recipe.data.sets[name] = replace(one, documents=min(one.documents, 300))
        return train(loaded, *others)

    monkeypatch.setattr(training, "_train", train_on_little)


@pytest.mark.usefixtures("_own_parts", "_little_text")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # a page may write a module and import it
    for block in marked_blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file is not None:
            if block.file.startswith("src/") and not Path("src").exists():
                copy_checkout(tmp_path)
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.body, where, "exec"), {"__name__": "__main__"})
        else:
            run_shell(block, where)


def copy_checkout(folder: Path) -> None:
    """The sources, to which a page adds files as a developer would; commands run with these from then on."""
    shutil.copytree(ROOT / "src", folder / "src")  # with what is compiled already
    (folder / "recipes").symlink_to(ROOT / "recipes")


def run_shell(block: Block, where: str) -> None:
    """Plain `braid` lines in this process, where torch is loaded already; what needs a shell, in one.

    Where the page has changed a checkout, another process runs all lines with its sources.
    """
    assert block.language == "bash", f"{where}: only bash and python blocks can run"
    lines = [line for line in block.body.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]
    if Path("src").is_dir():
        run_outside([warm_python(), "-c", ALL_LINES, *lines], where, PYTHONPATH=str(Path("src").resolve()))
        return
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "braid" and not FOR_THE_SHELL & set(QUOTED.sub("", line)):
            assert main(words[1:]) == 0, f"{where}: {line}"
        else:
            run_outside(["bash", "-euo", "pipefail", "-c", line], f"{where}: {line}")


ALL_LINES = """
import os, shlex, subprocess, sys
from braidlm.cli.main import main
os.cpu_count = lambda: 1  # as in this process: others to pack little text would each import torch
for line in sys.argv[1:]:
    verb, *words = shlex.split(line, comments=True)
    code = main(words) if verb == "braid" else subprocess.call(["bash", "-euo", "pipefail", "-c", line])
    assert code == 0, line
"""


def run_outside(command: list[str], where: str, **environment: str) -> None:
    """Run a command in a process of its own, which must succeed."""
    path = os.pathsep.join([str(Path(warm_python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"


def test_the_tutorials_are_tested() -> None:
    tested = {page.relative_to(ROOT) for page in PAGES}
    assert {page.relative_to(ROOT) for page in (ROOT / "docs" / "tutorials").glob("*.md")} <= tested
    assert Path("docs/extend.md") in tested
