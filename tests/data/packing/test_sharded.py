"""Data sets in shards: the same as in one, wherever they are; a cache of bounded size; what may go wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.packing.packed_data import PackedData, is_packed
from braidlm.data.packing.prepare import prepare
from braidlm.data.packing.sharded import ShardedData, open_packed

ADDRESS = "memory://bucket/set"
ARRAYS = ("tokens", "word_starts", "document_starts", "document_words", "document_bytes", "document_target_bytes")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def make(out: Path | str, documents: int = 60, source: str = "stories", **options: object) -> PackedData:
    return prepare(source, out, documents=documents, tokenizer="bytes", workers=1, shard_mb=0.005, **options)


def same(a: PackedData, b: PackedData) -> bool:
    return all(np.array_equal(getattr(a, name)[:], getattr(b, name)[:]) for name in ARRAYS)


def test_a_set_in_shards_is_the_set(tmp_path: Path, scratch: fsspec.AbstractFileSystem) -> None:
    whole, data = make(tmp_path / "whole"), make(ADDRESS)
    assert isinstance(data, ShardedData)
    assert len(data.shards) > 5
    assert same(whole, data)
    assert is_packed(ADDRESS)
    facts = ("tokens", "documents", "words", "bytes", "dtype", "tokenizer", "eos_id")
    assert all(getattr(whole.manifest, name) == getattr(data.manifest, name) for name in facts)
    positions = np.random.default_rng(0).integers(0, whole.manifest.tokens, (7, 5))
    assert np.array_equal(data.tokens.take(positions), whole.tokens.take(positions))
    assert (data.tokenizer_folder / "tokenizer.json").read_bytes() == (
        tmp_path / "whole/tokenizer/tokenizer.json"
    ).read_bytes()
    assert not (tmp_path / "set.part").exists()
    scratch.get("/bucket/set", str(tmp_path / "copy"), recursive=True)
    assert same(whole, open_packed(tmp_path / "copy"))


def test_answers_in_shards(tmp_path: Path) -> None:
    reading = {"source": "maths", "fields": "question", "answer": "answer"}
    whole, data = make(tmp_path / "whole", **reading), make(ADDRESS, **reading)
    assert data.manifest.targets == whole.manifest.targets
    assert np.array_equal(data.targets[:], whole.targets)
    assert same(whole, data)


def test_the_same_command_again_and_after_a_failure(
    tmp_path: Path, scratch: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(ADDRESS)
    written = {name: scratch.created(name) for name in scratch.find("/bucket/set")}
    make(ADDRESS)
    assert written == {name: scratch.created(name) for name in scratch.find("/bucket/set")}
    with pytest.raises(BraidError, match="made from other sources"):
        make(ADDRESS, documents=61)
    for name in ("/bucket/set/data.json", "/bucket/set/000001/shard.json"):  # as if it had been killed
        scratch.rm_file(name)
    make(ADDRESS)
    changed = {name for name in written if scratch.created(name) != written[name]}
    again = {f"/bucket/set/000001/{name}.bin" for name in ("tokens", "words", "documents", "lengths")}
    begun = {"/bucket/set/000001/shard.json", "/bucket/set/data.json", "/bucket/set/key.json"}
    assert {name for name in changed if "tokenizer/" not in name} == again | begun
    assert open_packed(ADDRESS).manifest == made.manifest


def test_replaced_sets_and_limits(tmp_path: Path) -> None:
    first = make(ADDRESS)
    second = make(ADDRESS, documents=30, replace=True)
    assert second.manifest.documents == 30
    with pytest.raises(BraidError, match="not the one that the index"):
        _ = first.tokens[:]
    with pytest.raises(BraidError, match="has no limit"):
        make("memory://bucket/other", limit_documents=3)


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    make(ADDRESS)
    data = open_packed(ADDRESS, tmp_path / "cache", cache_gb=45e-6)
    assert isinstance(data, ShardedData)
    for index in range(len(data.shards)):
        data.shard(index)
    shards = [path for path in (tmp_path / "cache/shards").iterdir() if len(path.name) == 32]
    assert 1 <= len(shards) < len(data.shards)
    assert sum(file.stat().st_size for path in shards for file in path.iterdir()) <= 45_000
    assert data.shards[len(data.shards) - 1].sha256[:32] in {path.name for path in shards}
    with pytest.raises(BraidError, match=r"the cache has fewer.*\n.*data.cache_gb="):
        data.prefetch(range(len(data.shards)))


def test_the_cache_is_shared(scratch: fsspec.AbstractFileSystem) -> None:
    expected = make(ADDRESS).tokens[:]
    for name in scratch.glob("/bucket/set/*/*.bin"):  # what is not in the cache could not be had any more
        scratch.rm_file(name)
    assert np.array_equal(open_packed(ADDRESS).tokens[:], expected)


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    data = make(ADDRESS)
    expected = data.tokens[:]
    for file in (tmp_path / "data/shards").glob("*/tokens.bin"):
        file.write_bytes(b"")
    assert np.array_equal(open_packed(ADDRESS).tokens[:], expected)


def test_vanished_and_changed_shards(scratch: fsspec.AbstractFileSystem) -> None:
    make(ADDRESS)
    content = bytearray(scratch.cat_file("/bucket/set/000002/tokens.bin"))
    content[0] ^= 1
    scratch.pipe_file("/bucket/set/000002/tokens.bin", bytes(content))
    scratch.rm_file("/bucket/set/000001/words.bin")
    data = open_packed(ADDRESS)
    assert isinstance(data, ShardedData)
    data.shard(0)
    with pytest.raises(BraidError, match="000001: the index of its data set has this shard, and it is gone"):
        data.shard(1)
    with pytest.raises(BraidError, match="000002: this shard is not the one"):
        data.shard(2)


def test_what_is_no_set_in_shards(tmp_path: Path, scratch: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(BraidError, match="no packed data set at this address"):
        open_packed("memory://bucket/nothing")
    make(tmp_path / "whole")
    scratch.put(str(tmp_path / "whole"), "/bucket/whole", recursive=True)
    with pytest.raises(BraidError, match="not in shards, and is at an address"):
        open_packed("memory://bucket/whole")
    make(ADDRESS)
    facts = json.loads(scratch.cat_file("/bucket/set/data.json"))
    facts["shards"].pop()
    scratch.pipe_file("/bucket/set/data.json", json.dumps(facts).encode())
    with pytest.raises(BraidError, match="do not add up"):
        open_packed(ADDRESS)
