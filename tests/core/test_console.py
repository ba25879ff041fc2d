"""Progress where there is no terminal."""

import pytest

from braidlm.core import console


def test_plain_progress_says_the_end_once(capsys: pytest.CaptureFixture[str]) -> None:
    advance = console._plain_progress("reading", 2.0, "MB")
    for done in (1.0, 2.0, 2.0, 2.1):
        advance(done, "")
    assert capsys.readouterr().out == "reading: 2 of 2 MB\n"


def test_plain_progress_gives_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 11.0, 12.0, 30.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    advance = console._plain_progress("packing", 100.0, "MB")
    for done in (5.0, 25.0, 30.0, 100.0):
        advance(done, "fast")
    assert capsys.readouterr().out == "packing: 25 of 100 MB  fast  33s left\npacking: 100 of 100 MB  fast\n"
