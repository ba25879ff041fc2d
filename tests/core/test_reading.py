"""Files that somebody else wrote are read within bounds, are of the expected type, or are refused by name."""

import os
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.core.reading import (
    MAX_DEPTH,
    existing_folder,
    parse_json,
    parse_row,
    parse_yaml,
    read_bytes,
    read_json,
    read_text,
    read_yaml,
)

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object, found a list"),
        ("null", "expected an object, found nothing"),
        ('"text"', "expected an object, found a text"),
        ("3", "expected an object, found a number"),
        ("", "this is not valid JSON"),
        ('{"a": ' + nested(MAX_DEPTH + 1) + "}", "nested more than 100 levels deep"),
        (nested(100_000), "nested more than 100 levels deep"),
        ("9" * 5000, "this is not valid JSON"),
    ],
    ids=["list", "null", "text", "number", "empty", "deep", "very deep", "long number"],
)
def test_json_of_another_kind_is_refused(text: str, message: str) -> None:
    with pytest.raises(BraidError, match=message) as caught:
        parse_json(text, "a.json")
    assert caught.value.where == "a.json"


def test_json_of_the_expected_kind() -> None:
    assert parse_json("[1]", "a.json", expect=list) == [1]
    assert parse_json("null", "a.json", expect=object) is None
    assert parse_json(nested(MAX_DEPTH), "a.json", expect=list)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "this line is not JSON (Expecting property name enclosed in double quotes at character 2)"),
        ("[1]", "this line is not an object but [1]"),
        (nested(5000), "this line is not JSON (it is nested more than 100 levels deep)"),
    ],
    ids=["cut", "list", "deep"],
)
def test_a_row_that_is_no_object_is_refused(line: str, message: str) -> None:
    with pytest.raises(BraidError) as caught:
        parse_row(line, "a.jsonl, line 3", "Repair it.")
    assert str(caught.value) == f"a.jsonl, line 3: {message}\nRepair it."


ALIAS_BOMB = "a0: &a0 [x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 4}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected an object, found a list"),
        ("", "expected an object, found nothing"),
        ("a: [", "this is not valid YAML: while parsing"),
        ("a: " + nested(MAX_DEPTH + 1), "nested more than 100 levels deep"),
        (ALIAS_BOMB, "holds more than 100,000 values"),
        ("a: &a [*a]", "the alias '\\*a' stands for nothing complete"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: 2020-13-01", "month must be in"),
    ],
    ids=["list", "empty", "cut", "deep", "aliases", "circle", "code", "date"],
)
def test_yaml_of_another_kind_is_refused(text: str, message: str) -> None:
    with pytest.raises(BraidError, match=message) as caught:
        parse_yaml(text, "a.yaml")
    assert caught.value.where == "a.yaml"


def test_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: [1, 2]}\nb: *a\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}}


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BraidError, match=r"sparse\.json: this file has 1,099,511,627,776 bytes"):
        read_json(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").write_text("x")
    for name, message in {
        "pipe": "this is not a plain file",
        "link": "this link leads to nothing",
        "circle": "these links lead in a circle",
        "file/inner": "a file stands where a folder is expected",
        ".": "this is a folder, and a file is expected",
        "x" * 300: "this name is too long",
        "a\0b": "this is not the name of a file or folder",
    }.items():
        with pytest.raises(BraidError, match=message):
            read_bytes(tmp_path / name)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(BraidError, match=r"a\.txt: this is not UTF-8 text \(invalid start byte at byte 2\)"):
        read_text(tmp_path / "a.txt")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    assert existing_folder(tmp_path) == tmp_path
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, message in {
        "none": "there is no such folder",
        "file": "a file stands where a folder is expected",
        "link": "this link leads to nothing",
        "x" * 300: "this name is too long",
        "a\0b": "this is not the name of a file or folder",
    }.items():
        with pytest.raises(BraidError, match=message):
            existing_folder(tmp_path / name)
    with pytest.raises(BraidError, match="there is no such folder"):
        existing_folder("~no-such-user/model")
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    with pytest.raises(BraidError, match=r"caf\\udce9': the name of this folder is not UTF-8"):
        existing_folder(odd)


@pytest.mark.skipif(IS_ROOT, reason="root may read everything")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o000)
    with pytest.raises(BraidError, match="no permission to open this"):
        existing_folder(tmp_path / "locked")


def test_a_file_name_that_is_not_utf8_can_be_recorded(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    write_json(tmp_path / "lineage.json", {"source": name})
    assert read_json(tmp_path / "lineage.json") == {"source": name}
