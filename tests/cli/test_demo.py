"""The demo from end to end, at toy size."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.studies import demo
from tests.report_pages import charts_of

SMALL = [
    "domains.stories.documents=150",
    "domains.maths.documents=150",
    "data.tokenizer.vocab_size=300",
    "data.length=64",
    "models.path.width=16",
    "models.dense.width=32",
    "models.dense.stages.0.block.layers=1",
    "epochs=0.3",
    "steps.stories.train.epochs=0.3",
    "steps.maths.train.epochs=0.3",
    "steps.composed.train.epochs=0.3",
    "training.warmup=1 steps",
    "validation.every=4 steps",
    "validation.tokens=1000",
]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder, and what its first run printed."""
    folder, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["demo", "--out", str(folder), *SMALL]) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def demo_folder(first_run: tuple[Path, str]) -> Path:
    return first_run[0]


def test_a_first_run_calls_nothing_finished_already(first_run: tuple[Path, str]) -> None:
    assert "packing" in first_run[1]
    assert "finished already" not in first_run[1]
    *_, report, look = first_run[1].strip().splitlines()
    assert report == f"The report: {first_run[0] / 'report.html'}"
    assert look.endswith(f"braid serve {first_run[0]} --open")


def test_the_page_tells_the_whole_story(demo_folder: Path) -> None:
    page = (demo_folder / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h[23] id=[^>]*>(.*?)</h[23]>", page)
    assert headings[:4] == [
        "What was found",
        "Two owners keep 60% of their text to themselves: what do they get?",
        "What does it cost when one of them withdraws?",
        "What would one model that saw all of the text reach?",
    ], "the verdict comes first"
    for heading in (
        "What was done",
        "Who goes where",
        "Take a path away",
        "Composed into one model",
        "How they learned",
        "Every number",
        "What they write",
        "What it took",
        "Go on from here",
    ):
        assert heading in headings
    for name in ("stories", "maths", "composed", "dense", "unigram", "trigram"):
        assert name in page
    assert "paths in parallel" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "the page needs nothing from outside"


def test_it_has_charts_and_the_routing_report_lies_beside_it(demo_folder: Path) -> None:
    charts = charts_of(demo_folder / "report.html")
    assert list(charts) == ["comparison", "routes", "learning-stories", "learning-maths"], "the main one first"
    assert charts["comparison"]["values"]["stories"].keys() == {"stories", "composed", "dense", "trigram"}
    routes = (demo_folder / "routes" / "routes.html").read_text(encoding="utf-8")
    assert "stories" in routes
    assert 'href="../report.html"' in routes
    assert 'href="routes/routes.html"' in (demo_folder / "report.html").read_text(encoding="utf-8")


def test_the_same_call_again_shows_what_is_there(
    demo_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report, told = demo.demo_report, []
    monkeypatch.setattr(demo, "demo_report", lambda facts: told.append(facts) or report(facts))
    before = sorted(demo_folder.glob("seed-1/*/checkpoints/*"))
    assert main(["demo", "--out", str(demo_folder), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "is finished already: the same sources" not in shown, "nobody asked for the data by name"
    assert shown.count("is finished already") == 4, "each run"
    assert "Bits per byte" in shown
    assert sorted(demo_folder.glob("seed-1/*/checkpoints/*")) == before
    (facts,) = told
    trained = facts.seconds["paths, composed model and dense model trained"]
    assert trained >= sum(model.wall_seconds for model in facts.results.models), "the training of the first call"
