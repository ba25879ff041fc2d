"""Addresses over memory, and over S3's protocol with a stand-in server."""

import errno
import gzip
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from braidlm.core import addresses
from braidlm.core.addresses import attempt, download, exists, file_facts, files_at, is_address, open_address, upload
from braidlm.core.errors import BraidError
from braidlm.data.sources.plan import ReadOptions, plan_shards
from tests.data.s3_server import Store, s3_server


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(addresses, "WAITS", (0.0, 0.0))
    store = Store()
    store.objects["texts/a/one.txt"] = b"one\n\ntwo"
    with s3_server(store):
        yield store


def read(*sources: str, **options: object) -> list[str]:
    plan = plan_shards(sources, ReadOptions(**options), 40)
    return [text for shard in plan.shards for text in shard.format.documents(shard, ReadOptions(**options))]


def test_what_is_an_address() -> None:
    assert is_address("s3://bucket/key")
    assert is_address("HF://datasets/x")
    assert not any(map(is_address, ("data/x", "hub:NAME", "C:\\x", Path("/s3/x"), "train=s3://x")))


def test_sources_of_every_kind(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {number}" for number in range(12)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=5)
    rows = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    memory.pipe_file("/t/a.txt", "\n\n".join(texts).encode())
    memory.pipe_file("/t/b.txt.gz", gzip.compress("\n\n".join(texts).encode()))
    memory.pipe_file("/t/in/c.jsonl", rows)
    memory.pipe_file("/t/d.parquet", (tmp_path / "a.parquet").read_bytes())
    memory.pipe_file("/t/.hidden/e.txt", b"no")
    memory.pipe_file("/t/other.bin", b"no")
    assert read("memory://t") == texts * 4
    assert read("memory://t/*.txt") == texts
    assert read("memory://t/in/c.jsonl") == texts
    assert len(plan_shards("memory://t/a.txt", ReadOptions(), 40).shards) > 2


def test_a_changed_file_has_another_fingerprint(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe_file("/t/a.txt", b"one")
    before = plan_shards("memory://t/a.txt", ReadOptions()).fingerprints
    assert before == plan_shards("memory://t/a.txt", ReadOptions()).fingerprints
    memory.pipe_file("/t/a.txt", b"two")
    assert before != plan_shards("memory://t/a.txt", ReadOptions()).fingerprints


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("memory://nothing/here", "nothing at this address"),
        ("foo://bucket/x", "cannot be read .*foo"),
        ("gs://bucket/x", "need the package 'gcsfs'"),
    ],
)
def test_wrong_addresses(address: str, what: str) -> None:
    with pytest.raises(BraidError, match=what):
        plan_shards(address, ReadOptions())


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.ENOSPC, "full")])
def test_mistakes_and_a_full_disk_are_not_tried_again(error: Exception) -> None:
    calls = []

    def work(system: object, path: str) -> None:
        calls.append(path)
        raise error

    with pytest.raises(type(error)):
        attempt("memory://x", work)
    assert len(calls) == 1


def test_files_over_s3(store: Store, tmp_path: Path) -> None:
    assert files_at("s3://texts/a") == files_at("s3://texts/*/*.txt") == ["s3://texts/a/one.txt"]
    assert exists("s3://texts/a")
    assert not exists("s3://texts/b")
    assert file_facts("s3://texts/a/one.txt")[0] == 8
    with open_address("s3://texts/a/one.txt") as file:
        file.seek(5)
        assert file.read() == b"two"
    download("s3://texts/a/one.txt", tmp_path / "one")
    upload(tmp_path / "one", "s3://texts/b/two.txt")
    assert store.objects["texts/b/two.txt"] == b"one\n\ntwo"
    assert read("s3://texts/b") == ["one", "two"]


def test_failures_that_pass_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "WAITS", (0.0, 0.0))
    failures = [TimeoutError("slow"), ConnectionResetError("gone")]

    def work(system: object, path: str) -> str:
        if failures:
            raise failures.pop()
        return path

    assert attempt("memory://x", work) == "/x"
    failures += [TimeoutError("slow")] * 3
    with pytest.raises(BraidError, match="cannot be reached after 3 attempts"):
        attempt("memory://x", work)


def test_a_local_file_by_its_address(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert read(f"file://{tmp_path}") == ["one", "two"]


def test_missing_buckets_and_credentials(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("s3://nowhere/x", "s3://texts/none"):
        with pytest.raises(BraidError, match="nothing at this address"):
            download(address, tmp_path / "x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    with pytest.raises(BraidError, match="no credentials"):
        files_at("s3://texts/a")
