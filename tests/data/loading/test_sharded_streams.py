"""Training on a data set in shards: every token once, the same on any number of processes, resumed at the token."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import Chunking, Consecutive, Contiguous, Documents, Windows
from braidlm.data.loading.config import DataConfig, DataSetConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import open_data
from braidlm.data.loading.order import order_streams
from braidlm.data.loading.sharded_streams import TOGETHER, stream_of
from braidlm.data.loading.streams import Subset
from braidlm.data.loading.validation import validation_windows
from braidlm.data.packing.prepare import prepare
from braidlm.data.packing.sharded import open_packed
from braidlm.model.config.registry import Choice
from tests.data.s3_server import Store, s3_server

ADDRESS = "memory://bucket/set"


@pytest.fixture(scope="module", autouse=True)
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare("stories", ADDRESS, documents=80, tokenizer="bytes", workers=1, shard_mb=0.002)
        yield
    fsspec.filesystem("memory").store.clear()


def loader(chunking: Chunking | None = None, rows: int = 8, rank: int = 0, world: int = 1, **cache: float) -> Loader:
    data = open_packed(ADDRESS, **cache)
    return Loader([stream_of(data)], chunking or Contiguous(), 16, rows, seed=3, rank=rank, world=world)


def test_an_epoch_reads_every_shard_once_in_groups() -> None:
    data = open_packed(ADDRESS)
    assert len(data.manifest.shards) > 2 * TOGETHER
    reading, seen = loader(rows=1), []
    while reading.epochs["set"] < 1:
        seen.append(reading.next_batch().whole.positions)
    counts = Counter(np.concatenate(seen).ravel().tolist())
    assert set(counts.values()) == {1}
    assert len(counts) >= data.manifest.tokens - 16 * stream_of(data).parts
    shards = np.searchsorted(data.token_bounds, [positions[0, 0] for positions in seen], side="right")
    groups = [set(shards[at : at + 40]) for at in range(0, len(shards) - 40, 40)]
    assert max(map(len, groups)) <= 2 * TOGETHER  # only a few shards are read at a time
    second = [int(reading.next_batch().whole.positions[0, 0]) for _ in range(10)]
    assert second != [int(positions[0, 0]) for positions in seen[:10]]


@pytest.mark.parametrize("chunking", [Contiguous(), Windows(Windows.Config(stride=20)), Consecutive(), Documents()])
def test_resuming_and_any_number_of_processes(chunking: Chunking) -> None:
    alone, parts = loader(chunking), [loader(chunking, rows=4, rank=rank, world=2) for rank in range(2)]
    for step in range(150):
        mark = {"tokens_left": 21} if step % 7 == 3 else {}
        whole, pieces = alone.next_batch(**mark), [part.next_batch(**mark) for part in parts]
        assert np.array_equal(whole.inputs, np.concatenate([piece.inputs for piece in pieces]))
        assert np.array_equal(whole.labels, np.concatenate([piece.labels for piece in pieces]))
        if step % 29 == 0:
            state = json.loads(json.dumps(alone.state()))
            assert state == parts[1].state()
            parts = [loader(chunking, rows=4, rank=rank, world=2) for rank in range(2)]
            for part in parts:
                part.load_state(state)
    assert alone.state()["places"]["set"][2] > 0  # several groups were read


def test_a_small_cache_changes_nothing(tmp_path: Path) -> None:
    size = 2.2e-9 * 3 * TOGETHER * max(shard.tokens for shard in open_packed(ADDRESS).manifest.shards) + 2e-6
    large, small = loader(), loader(cache=tmp_path / "small", cache_gb=size)
    for _ in range(200):
        assert np.array_equal(large.next_batch().inputs, small.next_batch().inputs)


def test_held_out_shards_are_never_trained_on() -> None:
    spec = DataSetConfig(path=ADDRESS, holdout=0.1)
    opened = open_data(DataConfig({"set": spec}, length=16))
    (train,), (held_out,) = opened.train, opened.validation
    assert not set(train.shards) & set(held_out.shards)
    assert sorted([*train.shards, *held_out.shards]) == list(range(len(train.data.shards)))
    assert train.documents + held_out.documents == 80
    windows = validation_windows(held_out, 16, 300)
    labels = np.concatenate([labels[labels >= 0] for _, labels in windows])
    assert len(labels) == windows.tokens
    assert np.array_equal(labels, held_out.read(0, windows.end)[0])
    chosen = held_out.chosen[: int(np.searchsorted(held_out.document_bounds, windows.end))]
    assert windows.bytes == train.data.document_bytes[chosen].sum()
    halves = [open_data(DataConfig({"set": replaced}, length=16)).train[0] for replaced in _halves()]
    assert not set(halves[0].shards) & set(halves[1].shards)


def _halves() -> list[DataSetConfig]:
    return [DataSetConfig(path=ADDRESS, holdout=0.0, subset=Subset(*part)) for part in ((0.0, 0.5), (0.5, 1.0))]


def test_what_shards_cannot_do() -> None:
    stream = stream_of(open_packed(ADDRESS))
    with pytest.raises(BraidError, match="in shards is read to its end"):
        Loader([stream], Contiguous(Contiguous.Config(words_per_epoch=50)), 16, 2)
    with pytest.raises(BraidError, match="shortest of the"):
        Loader([stream], Contiguous(), len(stream) // stream.parts + 99, 2)
    with pytest.raises(BraidError, match="this data set is in shards"):
        order_streams([stream], Choice("length", None), 0)
    with pytest.raises(BraidError, match=r"0.001 of \d+ shards is none"):
        open_data(DataConfig({"set": DataSetConfig(path=ADDRESS, holdout=0.001)}, length=16))


def test_over_s3(tmp_path: Path) -> None:
    """One group is read while the next comes; a position goes on in another process, whose cache is empty."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    system = fsspec.filesystem("memory")
    store = Store()
    store.objects = {f"b{name.removeprefix('/bucket')}": system.cat_file(name) for name in system.find("/bucket/set")}
    expected = loader()
    with s3_server(store):
        reading = Loader([stream_of(open_packed("s3://b/set", tmp_path / "a"))], Contiguous(), 16, 8, seed=3)
        reading.next_batch()
        expected.next_batch()
        again = Loader([stream_of(open_packed("s3://b/set", tmp_path / "b"))], Contiguous(), 16, 8, seed=3)
        again.load_state(json.loads(json.dumps(reading.state())))
        for _ in range(80):
            assert np.array_equal(again.next_batch().inputs, expected.next_batch().inputs)
