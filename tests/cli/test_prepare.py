"""`braid prepare` says what its results do not show."""

from pathlib import Path

import pytest

from braidlm.cli.main import main
from braidlm.data.packing.packed_data import PackedData


def test_names_are_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--documents", "3", "--tokenizer", "bytes"]
    assert main(["prepare", "stories", *options, "--out", "a[/packed]"]) == 0
    assert main(["prepare", "stories", *options, "--out", "b", "--name", "[/x]"]) == 0
    shown = capsys.readouterr().out
    assert "folder           a[/packed]" in shown
    assert "[/x]  " in shown


@pytest.mark.parametrize(("tokenizer", "told"), [("bpe", True), ("bytes", False)])
def test_of_several_sets_the_first_trains_the_tokenizer(
    tokenizer: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--documents", "30", "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    size = ["--vocab-size", "300"] if told else []
    assert main(["prepare", "tales=stories", "sums=maths", *options, *size]) == 0
    assert ("The tokenizer is trained on tales alone and used for all" in capsys.readouterr().out) == told


def test_breaks_of_lines_are_written_as_two_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "p": "two", "a": "three"}\n')
    reading = [
        "--field",
        "q",
        "--field",
        "p",
        "--answer",
        "a",
        "--joiner",
        "\\n\\n",
        "--template",
        "{question}\\n{answer}",
    ]
    options = ["--tokenizer", "bytes", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main(["prepare", str(tmp_path / "a.jsonl"), *reading, *options]) == 0
    assert bytes(PackedData(tmp_path / "out").tokens[:-1].tolist()) == b"one\n\ntwo\nthree"
