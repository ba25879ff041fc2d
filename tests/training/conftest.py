"""Data sets that every training test shares, prepared once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.data.packing.prepare import prepare


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data set with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=120, tokenizer="bpe", vocab_size=300, workers=1)
    return folder


@pytest.fixture(scope="session")
def maths(stories: Path) -> Path:
    """A second one, with the same tokenizer."""
    folder = stories.parent / "maths"
    prepare("maths", folder, documents=120, tokenizer=stories / "tokenizer", workers=1)
    return folder


@dataclass
class Answer:
    """What a command left on the screen."""

    code: int
    out: str
    err: str


@pytest.fixture
def braid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs a command in this process."""

    def run(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        seen = capsys.readouterr()
        return Answer(code, seen.out, seen.err)

    return run
