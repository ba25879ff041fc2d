"""Packed data in shards, at an address or in a folder, of which only some are on the disk of this machine.

Each shard is a packed folder of its own, and the set's data.json is the index: the counts and the hash of every shard.
Shards come into a cache of bounded size, which is a folder that processes and data sets may share; where the set is in
a folder, its shards are read where they are. What is read is in memory maps either way.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.addresses import download, files_at, is_address
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, json_sha256, make_folder, sha256_of, try_lock
from braidlm.data.packing.packed_data import Manifest, PackedData, ShardFacts, file_sizes, read_manifest

DEFAULT_CACHE_GB = 10.0
DOWNLOADS = 4
"""Shards that are on their way at a time."""
POLL_SECONDS = 0.05
NAME_LENGTH = 32
"""Characters of a shard's hash that name its folder in the cache."""


def open_packed(place: Path | str, cache: Path | str = "data", cache_gb: float = DEFAULT_CACHE_GB) -> PackedData:
    """The packed data set in a folder or at an address; shards from an address come into the cache."""
    manifest = read_manifest(place)
    if manifest.shards is None and not is_address(place):
        return PackedData(place, manifest)
    return ShardedData(place, manifest, ShardCache(Path(cache) / "shards", int(cache_gb * 1e9)))


def shard_sha256(folder: Path, names: Iterable[str]) -> str:
    """The hash of a shard: of the names and the hashes of its files."""
    return json_sha256({name: sha256_of(folder / name) for name in names})


class ShardCache:
    """Folders of shards by their hashes, with those that were used last; a little more than `size` bytes while shards
    are on their way. Processes that share it download each shard once."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self._room = threading.Lock()

    def get(self, address: str, shard: ShardFacts, manifest: Manifest) -> PackedData:
        """A shard, downloaded if it is not here."""
        folder = self.folder / shard.sha256[:NAME_LENGTH]
        while True:
            with contextlib.suppress(OSError):  # it is not here, or another process removes it at this moment
                os.utime(folder)
                try:
                    data = PackedData(folder, manifest)
                except BraidError:  # damaged, as its files do not have the bytes that they should have
                    shutil.rmtree(folder)
                else:
                    return data.opened()
            make_folder(self.folder)
            with open(folder.with_suffix(".lock"), "w") as lock:
                while try_lock(lock.fileno()) is False:
                    time.sleep(POLL_SECONDS)
                if not folder.is_dir():
                    self._download(address, shard, manifest, folder)

    def _download(self, address: str, shard: ShardFacts, manifest: Manifest, folder: Path) -> None:
        sizes = file_sizes(manifest)
        with self._room:
            self._make_room(sum(sizes.values()))
        with atomic_folder(folder) as scratch:
            try:
                for name in sizes:
                    download(f"{address}/{name}", scratch / name)
            except BraidError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                what = "the index of its data set has this shard, and it is gone"
                raise BraidError(what, address, "Restore it, or run the same `braid prepare` again.") from error
            if shard_sha256(scratch, sizes) != shard.sha256:
                what = "this shard is not the one that the index of its data set speaks of: it was changed or damaged"
                raise BraidError(what, address, "Restore it, or run `braid prepare` again with `--replace`.")

    def _make_room(self, size: int) -> None:
        """Remove the shards that were not used for the longest time, until there is room for `size` bytes."""
        known: list[tuple[float, int, Path]] = []
        for folder in self.folder.glob("*[!k]"):  # all but the locks
            with contextlib.suppress(OSError):
                known.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
        total = sum(each for _, each, _ in known)
        for _, each, folder in sorted(known):
            if total + size <= self.size:
                return
            if len(folder.name) == NAME_LENGTH:  # and no scratch folder, which is of a download
                shutil.rmtree(folder, ignore_errors=True)
                total -= each


class ShardedArray:
    """One of the arrays of a data set, read from its shards; as much of an array as is used of one."""

    def __init__(self, data: "ShardedData", name: str, bounds: np.ndarray, dtype: type | np.dtype):
        """`bounds` are where each shard's values begin, and where the last one ends."""
        self.data, self.name, self.bounds, self.dtype = data, name, bounds, np.dtype(dtype)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, key: slice | np.ndarray | int) -> np.ndarray:
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        return self.take(np.asarray(key))

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The values at positions of any shape; the last dimension is mostly in one shard."""
        flat = np.asarray(positions).reshape(-1)
        values = np.empty(flat.shape, self.dtype)
        rows = flat.reshape(-1, positions.shape[-1]) if flat.size and positions.ndim > 1 else flat[:, None]
        first, last = (self._shard_of(edge) for edge in (rows.min(axis=1), rows.max(axis=1)))
        into = values.reshape(rows.shape)
        for shard in np.unique(first):
            inside = np.flatnonzero((first == shard) & (last == shard))
            into[inside] = self._of(int(shard), rows[inside])
        for row in np.flatnonzero(first != last):
            shards = self._shard_of(rows[row])
            for shard in np.unique(shards):
                into[row, shards == shard] = self._of(int(shard), rows[row, shards == shard])
        return values.reshape(np.shape(positions))

    def _of(self, shard: int, positions: np.ndarray) -> np.ndarray:
        """The values at positions in one shard."""
        array: np.ndarray = getattr(self.data.shard(shard), self.name)
        return array.take(positions - self.bounds[shard])

    def _shard_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.bounds, positions, side="right") - 1


class DocumentStarts(ShardedArray):
    """[documents + 1] token positions: where each document begins, and where the last one ends."""

    def __len__(self) -> int:
        return super().__len__() + 1

    def _of(self, shard: int, positions: np.ndarray) -> np.ndarray:
        bounds = self.data.token_bounds
        if (positions == self.bounds[shard]).all():  # the shard need not be here
            return np.full(positions.shape, bounds[shard])
        return bounds[shard] + super()._of(shard, positions)


class ShardedData(PackedData):
    """A packed data set in shards, which come when they are read, or before (`prefetch`)."""

    def __init__(self, place: Path | str, manifest: Manifest, cache: ShardCache):
        if manifest.shards is None:
            todo = "Copy its folder to this machine, or prepare it again with an address as `--out`."
            raise BraidError("this data set is not in shards, and is at an address", str(place), todo)
        self.address, self.manifest, self._cache = str(place), manifest, cache
        self.shards: list[ShardFacts] = manifest.shards
        self._is_local = not is_address(place)
        self.folder = Path(place) if self._is_local else cache.folder / f"set-{self.sha256[:12]}"
        counts = np.array([(each.tokens, each.documents) for each in self.shards], np.int64).reshape(-1, 2)
        bounds = np.vstack([np.zeros((1, 2), np.int64), np.cumsum(counts, axis=0)])
        self.token_bounds, self.document_bounds = bounds[:, 0].copy(), bounds[:, 1].copy()
        if bounds[-1].tolist() != [manifest.tokens, manifest.documents]:
            raise self._damaged("the counts of its shards do not add up to those of data.json")
        self._opened: dict[int, Future[PackedData]] = {}
        self._wanted: set[int] = set()
        self._downloads = ThreadPoolExecutor(DOWNLOADS, "shards")

    @cached_property
    def sha256(self) -> str:
        """The hash of the contents of all shards."""
        return json_sha256([each.sha256 for each in self.shards])

    def shard(self, index: int) -> PackedData:
        """A shard, for which this waits if it is not here yet."""
        if index not in self._opened:
            beside = [each for each in self._opened if each not in self._wanted]
            for each in beside[:-DOWNLOADS]:
                del self._opened[each]
            self._opened[index] = self._downloads.submit(self._open, index)
        return self._opened[index].result()

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begin to open the shards that are read now and next; shards of the call before stay open, others close."""
        wanted = list(dict.fromkeys(map(int, indices)))
        size = sum(sum(file_sizes(self._manifest_of(index)).values()) for index in wanted)
        if size > self._cache.size and not self._is_local:
            what = f"the shards that are read now and next have {size / 1e9:.2f} GB, and the cache has fewer"
            raise BraidError(what, self.address, f"Give it more: data.cache_gb={1.1 * size / 1e9:.1g}.")
        for index in set(self._opened) - self._wanted - set(wanted):
            self._opened.pop(index).cancel()
        self._wanted = set(wanted)
        for index in wanted:
            if index not in self._opened:
                self._opened[index] = self._downloads.submit(self._open, index)

    def _open(self, index: int) -> PackedData:
        shard, manifest = self.shards[index], self._manifest_of(index)
        if self._is_local:
            return PackedData(self.folder / shard.name, manifest).opened()
        return self._cache.get(f"{self.address}/{shard.name}", shard, manifest)

    def _manifest_of(self, index: int) -> Manifest:
        each = self.shards[index]
        return replace(
            self.manifest,
            tokens=each.tokens,
            documents=each.documents,
            words=each.words,
            bytes=each.bytes,
            targets=each.targets,
            shards=None,
        )

    def _array(self, name: str, dtype: Any, of_documents: bool = False) -> ShardedArray:
        return ShardedArray(self, name, self.document_bounds if of_documents else self.token_bounds, dtype)

    # Each is opened when it is needed first; a plain data set has maps of files under these names.
    tokens: Any = cached_property(lambda self: self._array("tokens", self.manifest.dtype))
    word_starts: Any = cached_property(lambda self: self._array("word_starts", np.uint8))
    targets: Any = cached_property(lambda self: self.manifest.targets and self._array("targets", np.uint8))
    document_starts: Any = cached_property(
        lambda self: DocumentStarts(self, "document_starts", self.document_bounds, np.int64)
    )
    document_words: Any = cached_property(lambda self: self._array("document_words", np.uint32, True))
    document_bytes: Any = cached_property(lambda self: self._array("document_bytes", np.uint32, True))
    document_target_bytes: Any = cached_property(lambda self: self._array("document_target_bytes", np.uint32, True))

    @cached_property
    def tokenizer_folder(self) -> Path:  # type: ignore[override]
        """The tokenizer's folder on this machine."""
        folder = self.folder / "tokenizer"
        if self._is_local or folder.is_dir():
            return folder
        fetch_folder(f"{self.address}/tokenizer", folder)
        return folder


def fetch_folder(address: str, folder: Path) -> None:
    """Copy a folder of small files to the disk."""
    with atomic_folder(folder, replace=True) as scratch:
        for file in files_at(address):
            download(file, scratch / file.rpartition("/")[2])
