"""Documents out of every kind of source, in one order, divided anyhow; and the errors."""

import gzip
import json
import lzma
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data import sources
from braidlm.data.corpora.builtin import document
from braidlm.data.sources.format import FORMATS, by_document
from braidlm.data.sources.plan import MADE, ReadOptions, plan_shards
from braidlm.model.config.registry import import_files

PARAGRAPHS = [f"Story {number}: Zoë saw 你好.\nThe end of {number}." for number in range(40)]
ROWS = [{"text": text, "id": number, "meta": {"title": f"T{number}"}} for number, text in enumerate(PARAGRAPHS)]


def read(*sources: Path | str, shard_bytes: int | None = None, **options: Any) -> list[str]:
    read_options = ReadOptions(**options)
    return [
        text
        for shard in plan_shards(sources, read_options, shard_bytes).shards
        for text in shard.format.documents(shard, read_options)
    ]


def fails(*sources: Path | str, **options: Any) -> str:
    with pytest.raises(BraidError) as caught:
        read(*sources, **options)
    return str(caught.value)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("shard_bytes", [None, 1, 100])
def test_text_and_jsonl_in_every_compression(tmp_path: Path, suffix: str, shard_bytes: int | None) -> None:
    text, rows = tmp_path / f"a.txt{suffix}", tmp_path / f"a.jsonl{suffix}"
    text.write_bytes(COMPRESS[suffix]("\n\n".join(PARAGRAPHS).encode()))
    rows.write_bytes(COMPRESS[suffix]("\n".join(json.dumps(row) for row in ROWS).encode()))
    assert read(text, shard_bytes=shard_bytes) == PARAGRAPHS
    assert read(rows, shard_bytes=shard_bytes) == PARAGRAPHS


def test_separators_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\ntwo\r\n  \n\n\n three<|x|>four\n\n<|x|>\nfive", newline="")
    assert read(path) == ["one\ntwo", " three<|x|>four", "<|x|>\nfive"]
    assert [line for line in read(path, separator="lines") if line.strip()] == [
        "one",
        "two",
        " three<|x|>four",
        "<|x|>",
        "five",
    ]
    assert read(path, separator="<|x|>") == ["one\ntwo\n  \n\n\n three", "four", "five"]
    assert read(path, separator="file") == ["one\ntwo\r\n  \n\n\n three<|x|>four\n\n<|x|>\nfive"]


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n\r\té=<x>"), max_size=60),
    size=st.integers(1, 20),
    separator=st.sampled_from(["blank", "lines", "<x>", "==", "\n\n\n", "x"]),
)
def test_a_file_gives_the_same_documents_however_it_is_divided(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, separator: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "divided.txt"
    path.write_text("start" + text, newline="")
    whole = [item for item in read(path, separator=separator, shard_bytes=1 << 20) if item.strip()]
    assert [item for item in read(path, separator=separator, shard_bytes=size) if item.strip()] == whole
    if separator not in ("blank", "lines"):
        expected = [item.replace("\r\n", "\n").strip("\n") for item in ("start" + text).split(separator)]
        assert whole == [item for item in expected if item.strip()]


def test_a_marker_on_the_seam_of_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.data.sources.text.BLOCK", 4)
    path = tmp_path / "a.txt"
    path.write_text("aaa\nbb<|\nend|>cc\n<|\nend|>dd")
    assert read(path, separator="<|\nend|>") == ["aaa\nbb", "cc", "dd"]
    assert read(path, separator="<|\nend|>", shard_bytes=3) == ["aaa\nbb", "cc", "dd"]


def test_fields_are_joined_and_may_lie_deeper(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"q": "1+1?", "a": 2, "m": {"by": "x"}, "d.e": "dot"}\n\n{"q": null, "a": "two", "m": null, "d.e": ""}\n'
    )
    assert read(path, fields=("q", "a"), joiner=" = ") == ["1+1? = 2", "two"]
    assert read(path, fields=("m.by", "d.e")) == ["x\ndot", ""]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 22])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 20])
def test_parquet_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, batch_bytes: int
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    monkeypatch.setattr("braidlm.data.sources.rows.BATCH_BYTES", batch_bytes)

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    assert read(path, shard_bytes=shard_bytes) == PARAGRAPHS
    assert len(plan_shards([path], ReadOptions(), shard_bytes).shards) == (6 if shard_bytes == 1 else 1)
    titles = read(path, shard_bytes=shard_bytes, fields=("meta.title", "id"), joiner=":")
    assert titles == [f"T{number}:{number}" for number in range(40)]
    assert "there is no field 'txt'. Did you mean 'text'? It has: text, id, meta." in fails(path, fields=("txt",))
    text = fails(path, fields=("meta.tilte",))
    assert "in a recipe with `fields: [NAME]`" in text
    assert "a.parquet, row 1: there is no field 'meta.tilte'. Did you mean 'title'? It has: title." in text
    path.write_bytes(b"PAR1 no")
    assert "this is not a parquet file, or a damaged one" in fails(path)


def test_folders_and_globs_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/2.txt").write_text("two")
    (tmp_path / "b/1.train").write_text("one")
    (tmp_path / "a.jsonl").write_text('{"text": "zero"}')
    (tmp_path / "README").write_text("not data")
    (tmp_path / ".hidden.txt").write_text("no")
    assert read(tmp_path) == ["zero", "one", "two"]
    assert read(f"{tmp_path}/b/*.txt", tmp_path / "a.jsonl") == ["two", "zero"]
    assert read(f"{tmp_path}/**/[12].t*") == ["one", "two"]


def test_built_in_corpora_divide_by_number() -> None:
    expected = [document("stories", 3, number) for number in range(5, 25)]
    for shard_bytes in (1, 3000, None):
        assert read("stories", documents=20, first=5, seed=3, shard_bytes=shard_bytes) == expected
    assert "documents: expected a whole number from 1" in fails("maths", documents=0)


def test_hub_layout_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    for part in range(2):
        table = pyarrow.Table.from_pylist(ROWS[part * 20 : part * 20 + 20])
        parquet.write_table(table, tmp_path / f"data/train-{part:05d}-of-00002.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:3]), tmp_path / "data/test-00000-of-00001.parquet")
    assert read(f"hub:{tmp_path}") == PARAGRAPHS
    assert len(plan_shards([f"hub:{tmp_path}"], ReadOptions()).shards) == 2
    assert read(f"hub:{tmp_path}:test") == read(f"hub:{tmp_path}", split="test") == PARAGRAPHS[:3]
    assert "cannot be opened" in fails(f"hub:{tmp_path}:tset")
    assert "there is no field 'body'" in fails(f"hub:{tmp_path}", fields=("body",))


def test_other_encodings(tmp_path: Path) -> None:
    latin, wide = tmp_path / "latin.txt", tmp_path / "wide.txt"
    latin.write_bytes("Zoë\n\nfin".encode("latin-1"))
    wide.write_bytes("Zoë\n\n你<x>fin".encode("utf-16"))
    assert read(latin, encoding="latin-1", shard_bytes=1) == ["Zoë", "fin"]
    assert read(wide, encoding="utf-16", shard_bytes=1) == ["Zoë", "你<x>fin"]
    assert read(wide, encoding="utf-16", separator="<x>") == ["Zoë\n\n你", "fin"]
    assert read(latin, errors="replace") == ["Zo�", "fin"]
    text = fails(latin, shard_bytes=1)
    assert text.startswith(f"{latin}: byte 2 (0xeb) is not UTF-8 text\n")
    assert "`--encoding latin-1`" in text
    assert "`--errors replace`" in text
    latin.write_bytes(b"fine\n\nalso \xff")
    assert "byte 11 (0xff) is not UTF-8 text" in fails(latin, separator="file")
    assert "byte 11 (0xff)" in fails(latin, shard_bytes=1)


def test_wrong_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "x" * 50, "title": "t"})
    path.write_text(f"{good}\n{good}\n{{oops\n")
    for shard_bytes in (10, 1 << 20):
        text = fails(path, shard_bytes=shard_bytes)
        assert text.startswith(f"{path}, line 3: this line is not JSON (Expecting property name")
    path.write_text(f"{good}\n[1, 2]\n")
    assert f"{path}, line 2: this line is not an object but [1, 2]" in fails(path)
    path.write_text(f'{good}\n{{"txet": "a", "n": 1}}\n')
    assert f"{path}, line 2: there is no field 'text'. Did you mean 'txet'? It has: txet, n." in fails(path)
    path.write_text('{"text": ["a"]}')
    assert "line 1: the field 'text' holds a list, not text." in fails(path)
    path.write_text('{"text": {"en": "a"}}')
    assert "the field 'text' holds an object, not text. Its fields: en." in fails(path)
    path.write_text('{"text": "a \\ud83d b"}')
    assert "a text holds half a character" in fails(path)
    assert read(path, errors="replace") == ["a � b"]


@pytest.mark.parametrize("made", MADE, ids=str)
def test_what_braid_has_made_in_a_folder_of_text_is_not_read(tmp_path: Path, made: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_text("a text")
    inside = tmp_path / "out" / "checkpoints"
    inside.mkdir(parents=True)
    for name in made:
        (tmp_path / "out" / name).write_text("{}")
    (inside / "README.md").write_text("a card")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.txt").write_text("hidden")
    (tmp_path / "c.docx").write_text("another kind")
    plan = plan_shards([tmp_path], ReadOptions())
    assert [shard.source for shard in plan.shards] == [str(tmp_path / "a.txt")]
    assert plan.skipped == [str(tmp_path / "c.docx")]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "history.jsonl").write_text('{"text": "of a chat"}\n')
    assert len(plan_shards([tmp_path], ReadOptions()).shards) == 2, "a name alone says nothing"


def test_missing_unknown_and_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_text("x")
    text = fails(tmp_path / "trian.txt")
    assert "trian.txt: there is no such file, folder or corpus. Did you mean 'train.txt'?" in text
    assert "the corpora stories, maths" in text
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'stories'?" in fails("storys")
    assert "no file matches" in fails(f"{tmp_path}/*.jsonl")
    (tmp_path / "a.docx").write_bytes(b"PK\0")
    assert "unknown kind of file '.docx'" in fails(tmp_path / "a.docx")
    assert "Braid reads .csv, .tsv, .jsonl, .ndjson, .parquet, .txt" in fails(tmp_path / "a.docx")
    (tmp_path / "b.json").write_text("[]")
    assert "only files of an unknown kind (.docx, .json)" in fails(f"{tmp_path}/*.[dj]*")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    assert "these links lead in a circle" in fails(tmp_path / "circle.txt")
    assert "these links lead in a circle" in fails(f"{tmp_path}/circ*.txt")
    assert "these links lead in a circle" in fails(tmp_path)
    (tmp_path / "inside").mkdir()
    os.mkfifo(tmp_path / "inside" / "pipe.txt")
    assert "this is not a plain file" in fails(tmp_path / "inside" / "pipe.txt")
    assert "this is not a plain file" in fails(tmp_path / "inside", section_bytes=None)
    assert "the field 'text' is to be the answer" in fails("stories", answer="text")
    assert "`hub:` needs the name of a data set" in fails("hub:")
    (tmp_path / "empty.txt").write_text("")
    assert "there is no text in it" in fails(tmp_path / "empty.txt")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_cut_off_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    whole = COMPRESS[suffix](os.urandom(5000).hex().encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert "this compressed file is damaged or cut off" in fails(path)
    path.write_bytes(b"this is not compressed at all")
    assert "this compressed file is damaged or cut off" in fails(path)
    path.write_bytes(COMPRESS[suffix](b"one\n\n") + COMPRESS[suffix](b"two"))  # two archives in one file
    assert read(path) == ["one", "two"]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n\r\té🦊=<x>"), max_size=60),
    block=st.integers(1, 12),
    separator=st.sampled_from(["blank", "lines", "file", "<x>", "==", "\n\n\n", "x"]),
)
def test_a_document_is_the_same_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int, separator: str
) -> None:
    path, options = tmp_path_factory.getbasetemp() / "pieces.txt", ReadOptions(separator=separator)
    path.write_text("start" + text, newline="", encoding="utf-8")
    whole = read(path, separator=separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("braidlm.data.sources.text.BLOCK", block)
        patch.setattr("braidlm.data.sources.files.BLOCK", block)
        (shard,) = plan_shards([path], options, 1 << 20).shards
        pieces = list(shard.format.pieces(shard, options))
        assert ["".join(texts) for texts, _ in by_document(pieces)] == whole
        assert max(len(piece.text) for piece in pieces) <= 2 * block + len(separator) + whitespace(text)
        assert read(path, separator=separator, shard_bytes=7) == read(path, separator=separator)


def whitespace(text: str) -> int:
    """The longest run of white space, which is held until it is known what follows."""
    return max(map(len, re.findall(r"\s*", text)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_line_longer_than_a_block_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("braidlm.data.sources.text.BLOCK", 1000)
    monkeypatch.setattr("braidlm.data.sources.files.BLOCK", 1000)
    text, path, options = "Zoë sah 你好 " * 3000, tmp_path / f"a.txt{suffix}", ReadOptions()
    path.write_bytes(COMPRESS[suffix](text.encode()))
    (shard,) = plan_shards([path], options).shards
    pieces = list(shard.format.pieces(shard, options))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) <= 1000


def test_an_error_in_a_later_piece_names_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.data.sources.text.BLOCK", 10)
    monkeypatch.setattr("braidlm.data.sources.files.BLOCK", 10)
    path = tmp_path / "a.txt"
    path.write_bytes("äöüß".encode() * 10 + b"\xff and more\n")
    for separator in ("blank", "lines", "file", "<x>"):
        assert "byte 80 (0xff)" in fails(path, separator=separator)
    path.write_bytes(b"0123456789 cut \xc3")
    for separator in ("blank", "lines", "file", "<x>"):
        assert "byte 15 (0xc3)" in fails(path, separator=separator)


def test_white_space_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidlm.data.sources.files.BLOCK", 100)
    monkeypatch.setattr("braidlm.data.sources.files.MAX_BLANK", 1000)
    path = tmp_path / "a.txt"
    path.write_bytes(b" " * 3000)
    for separator in ("blank", "lines"):
        assert "MB of white space in a row" in fails(path, separator=separator)
    path.write_bytes(b"a\n" + b"\n" * 3000 + b"b")
    assert read(path) == ["a", "b"]


def test_a_row_too_long_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    monkeypatch.setattr("braidlm.data.sources.rows.MAX_ROW_BYTES", 1000)
    rows = [{"text": "short"}] * 5 + [{"text": "long " * 300}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert f"{tmp_path}/a.jsonl, line 6: this row has more than" in fails(tmp_path / "a.jsonl")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert f"{tmp_path}/a.parquet, row 6: this row has more than" in fails(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[5:]), tmp_path / "b.parquet", compression="none")
    assert f"{tmp_path}/b.parquet, rows 1 to 1: this row has more than" in fails(tmp_path / "b.parquet")


SOURCE = """
from pathlib import Path
from braidlm.data.sources.format import FORMATS, Format, Shard

@FORMATS.register("shout")
class Shout(Format):
    extensions = (".shout",)
    names = ("echo",)

    def shards(self, source, options, shard_bytes):
        return [Shard("shout", source)]

    def documents(self, shard, options):
        return iter(["HELLO"] if shard.source == "echo" else Path(shard.source).read_text().upper().split())

    def fingerprint(self, source, options):
        return {"source": source}
"""


def test_a_source_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder is enough for files of a new extension and for a source with a name."""
    (tmp_path / "shout.py").write_text(SOURCE)
    (tmp_path / "a.shout").write_text("some words")
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "braidlm.data.sources.shout", raising=False)
    monkeypatch.setattr(FORMATS, "parts", dict(FORMATS.parts))
    import_files("braidlm.data.sources")
    options = ReadOptions()
    plan = plan_shards([tmp_path / "a.shout", "echo"], options)
    assert [text for shard in plan.shards for text in shard.format.documents(shard, options)] == [
        "SOME",
        "WORDS",
        "HELLO",
    ]


def test_a_file_of_another_kind_is_read_if_it_holds_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n\n\ny = 2\n")
    (tmp_path / "b.bin").write_bytes(bytes(9))
    assert read(tmp_path / "a.py") == read(tmp_path) == ["x = 1", "y = 2"]
    assert plan_shards([tmp_path], ReadOptions()).skipped == [str(tmp_path / "b.bin")]
    (tmp_path / "c.txt").write_text("prose")
    assert read(tmp_path) == ["prose"], "beside files of a known kind it is none"
    (tmp_path / "d.log").write_text("naïve", encoding="utf-16")
    assert read(tmp_path / "d.log", encoding="utf-16") == ["naïve"]
    assert "unknown kind of file '.log'" in fails(tmp_path / "d.log")


def test_columns_of_tables(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeff"text",year\n"one, ""two""\nlines",1\nlast\n\n', encoding="utf-8")
    (tmp_path / "b.tsv").write_text("year\ttext\n1\tun, deux\n2\t\n")
    assert read(tmp_path / "a.csv") == ['one, "two"\nlines', "last", ""]
    assert read(tmp_path / "b.tsv") == ["un, deux", ""]
    assert read(tmp_path, fields=("year", "text"), joiner=": ") == [
        '1: one, "two"\nlines',
        "last",
        "",
        "1: un, deux",
        "2",
    ]
    assert "there is no field 'txt'. Did you mean 'text'? It has: text, year." in fails(
        tmp_path / "a.csv", fields=("txt",)
    )
    (tmp_path / "c.csv").write_text("text\na,b\n")
    assert "this row has 2 cells, and 1 columns have names" in fails(tmp_path / "c.csv")
    (tmp_path / "d.csv").write_bytes(b"text\n\xff\n")
    assert "this is not a table of UTF-8 text" in fails(tmp_path / "d.csv")
    (tmp_path / "e.txt").write_text("prose")
    assert read(tmp_path) == ["prose"], "beside other files a table holds what is known about them"


@pytest.mark.parametrize("encoding", ["base64", "rot13", "undefined", "utf8\0", "nothing"])
def test_encodings_of_no_text(encoding: str) -> None:
    with pytest.raises(BraidError, match="encoding"):
        ReadOptions(encoding=encoding)
    with pytest.raises(BraidError, match="cannot hold the separator"):
        ReadOptions(encoding="latin-1", separator={"*.txt": "→"})
