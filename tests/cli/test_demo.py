"""The demo from end to end, at toy size."""

import json
import re
from pathlib import Path

import pytest

from braidlm.cli.main import main

SMALL = [
    "data.sets.stories.documents=200",
    "data.tokenizer.vocab_size=300",
    "model.width=32",
    "model.stages.0.block.layers=1",
    "training.budget=4 steps",
    "validation.every=2 steps",
    "samples.every=2 steps",
    "samples.tokens=8",
]


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", "--quiet", "--out", str(folder), *SMALL]) == 0
    return folder


def test_the_page_tells_what_was_measured(demo_folder: Path) -> None:
    page = (demo_folder / "report.html").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (demo_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [r for r in records if r["kind"] == "sample"]
    assert [r["step"] for r in samples] == [2, 4]
    for heading in ("What it writes", "How it learned", "Is that good?", "Does it know who is who?", "What it took"):
        assert heading in page
    assert "after 4 steps" in page
    for name in ("unigram", "trigram", "this model"):
        assert name in page
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page), "the page needs nothing from outside"


def test_pictures_lie_beside_it(demo_folder: Path) -> None:
    for name in ("learning.png", "comparison.png"):
        assert (demo_folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_same_call_again_shows_what_is_there(demo_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((demo_folder / "run" / "checkpoints").iterdir())
    assert main(["demo", "--out", str(demo_folder), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "is finished already" in shown
    assert "bits per byte" in shown
    assert sorted((demo_folder / "run" / "checkpoints").iterdir()) == before
