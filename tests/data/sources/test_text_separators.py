"""One separator for all text files, or one for each pattern of names."""

from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.packing.prepare import prepare
from braidlm.data.sources.plan import ReadOptions, plan_shards
from braidlm.data.sources.text import parse_separators, separator_of, unmatched_patterns


def test_options_of_a_command() -> None:
    assert parse_separators([]) == "blank"
    assert parse_separators(["lines"]) == "lines"
    assert parse_separators(["==="]) == "==="
    assert parse_separators(["\\n\\n\\n"]) == "\n\n\n"
    assert parse_separators(["file", "childes*=lines", "wiki.txt=="]) == {
        "childes*": "lines",
        "wiki.txt": "=",
        "*": "file",
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/corpus/train/childes.txt", "lines"),
        ("/corpus/train/childes.txt.gz", "lines"),
        ("/corpus/train/wiki.txt", "file"),
        ("/corpus/train/wiki.txt.zst", "file"),
        ("/corpus/dev/wiki.txt", "<x>"),
        ("/corpus/dev/other.txt", "blank"),
    ],
)
def test_the_first_pattern_counts(path: str, expected: str) -> None:
    rules = {"dev/wiki.txt": "<x>", "wiki.txt": "file", "child*": "lines"}
    assert separator_of(path, rules) == expected
    assert separator_of(path, "lines") == "lines"


def test_patterns_that_no_file_has() -> None:
    assert unmatched_patterns({"a.txt": "lines", "b*": "file", "*": "blank"}, ["/x/a.txt"]) == ["b*"]
    assert unmatched_patterns("lines", []) == []


def test_files_of_a_folder_are_separated_differently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("one\ntwo\n\nthree")
    options = ReadOptions(separator={"a*": "lines", "b.txt": "file"})
    for size in (None, 2):
        found = [
            text
            for shard in plan_shards([tmp_path], options, size).shards
            for text in shard.format.documents(shard, options)
        ]
        assert [text for text in found if text] == ["one", "two", "three", "one\ntwo\n\nthree", "one\ntwo", "three"]
    rules = {"a*": "lines", "b.txt": "file", "d*": "lines"}
    for workers in (1, 2):
        data = prepare(tmp_path, tmp_path / f"out{workers}", separator=rules, tokenizer="bytes", workers=workers)
        assert data.manifest.documents == 6
    assert "no file matches the pattern 'd*'" in capsys.readouterr().err
    with pytest.raises(BraidError, match="the separator is empty"):
        prepare(tmp_path, tmp_path / "out", separator={"a*": ""}, tokenizer="bytes")
