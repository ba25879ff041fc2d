"""The interpreter's standard library as a source of text."""

import sysconfig
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.data.packing.prepare import prepare
from braidlm.data.sources.plan import ReadOptions, plan_shards


def _documents(options: ReadOptions, shard_bytes: int | None = None) -> list[str]:
    plan = plan_shards(["python"], options, shard_bytes)
    return [text for shard in plan.shards for text in shard.format.documents(shard, options)]


def test_a_document_is_a_file_in_the_order_of_names() -> None:
    texts = _documents(ReadOptions(documents=3))
    folder = Path(sysconfig.get_path("stdlib"))
    assert texts[0] == (folder / "__future__.py").read_text()
    assert len(texts) == 3


def test_shards_do_not_change_the_documents() -> None:
    options = ReadOptions(documents=40)
    assert len(plan_shards(["python"], options, 100_000).shards) > 1
    assert _documents(options, 100_000) == _documents(options)


def test_other_packages_and_tests_are_left_out_and_files_may_declare_their_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "sub/b.py", "site-packages/c.py", "test/d.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "z.py").write_bytes("# -*- coding: latin-1 -*-\n'ä'\n".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert _documents(ReadOptions()) == ["# a.py\n", "# sub/b.py\n", "# -*- coding: latin-1 -*-\n'ä'\n"]


def test_an_interpreter_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BraidError, match="this Python has no source files"):
        plan_shards(["python"], ReadOptions())


def test_it_is_packed_like_any_source(tmp_path: Path) -> None:
    data = prepare("python", tmp_path / "packed", tokenizer="bytes", documents=2, workers=1)
    assert data.manifest.documents == 2
