"""Progress where there is no terminal, and tables that are too wide."""

from collections.abc import Callable
from functools import partial

import pytest
from rich.console import Console

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


def test_columns_that_do_not_fit_stand_in_further_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console._console, "_width", 24)
    columns, rows = (
        ("model", "first", "second", "third"),
        [("one", console.styled("12345", "bold"), "12345", "1"), ("two",) * 4],
    )
    console.table(columns, rows, keep=1)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "model first second",
        "one 12345 12345",
        "two two two",
        "",
        "model third",
        "one 1",
        "two two",
    ]
    console.table(("model", "a column wider than all there is"), [("one", "1")], keep=1)
    assert "1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "text"), [(1508.4375, "1508"), (12.5, "12.5"), (849_000.0, "849k"), (1_234_567.0, "1.23M"), (331, "331")]
)
def test_counts_are_short(number: float, text: str) -> None:
    assert console.count(number) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(256, "256 bytes"), (39_168, "39.2 kB"), (999_900, "1 MB"), (15.8e9, "15.8 GB"), (1.2345e12, "1,234 GB")],
)
def test_sizes_are_short(amount: float, text: str) -> None:
    assert console.size(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42.4, "42s"), (75, "1m15s"), (9_000, "2h30m"), (172_799, "47h59m"), (4108 * 3600, "171 days")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_a_title_is_printed_once_and_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console._console, "_width", 24)
    title = "Every model: what it costs and what it reaches"
    console.table(["model", "parameters", "wall clock"], [["one", "1,000,000", "5.3s"]], title=title, keep=1)
    assert capsys.readouterr().out.count(title) == 1


HOSTILE = "a\x1b[31mb\x07\x9b\u202e[/x][bold]:fire:"


@pytest.mark.parametrize("printed", ["write", "say", "warn", "error", "table", "progress"])
def test_texts_are_no_markup_and_no_commands_of_a_terminal(
    printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        if printed == "table":
            console.table([HOSTILE], [[HOSTILE], [console.styled(HOSTILE, "bold")]], HOSTILE)
        elif printed == "progress":
            with console.progress(HOSTILE, 1.0) as advance:
                advance(1.0, HOSTILE)
        else:
            getattr(console, printed)([HOSTILE] if printed == "error" else HOSTILE)
        return "".join(capsys.readouterr())

    piped = shown()
    assert "[/x][bold]:fire:" in piped
    # Nobody's terminal is in danger here; rich leaves bells out everywhere.
    assert HOSTILE.replace("\x07", "") in piped.replace("\x07", ""), "a pipe gets the text as it is"
    monkeypatch.setattr(console, "_make_console", partial(terminal, console._make_console))
    monkeypatch.setattr(console, "_console", console._make_console())
    in_terminal = shown()
    assert "a\\x1b[31mb\\x07\\x9b\\u202e[/x][bold]:fire:" in in_terminal
    assert not {"\x07", "\x9b", "\u202e"} & set(in_terminal)
    assert "\x1b[31mb" not in in_terminal


def terminal(make: Callable[..., Console], stderr: bool = False) -> Console:
    """The console as it is, but for its belief that it is a terminal."""
    made = make(stderr)
    made._force_terminal, made._width = True, 400
    return made


def test_lines_and_tabs_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "_console", terminal(console._make_console))
    console.write("a\r\tb\nc")
    assert capsys.readouterr().out == "a\\x0d\tb\nc"
