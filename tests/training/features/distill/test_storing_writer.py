"""Targets are written where they belong, in any runs of positions; errors of the threads reach the caller."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors
from braidlm.training.features.distill import storing
from braidlm.training.features.distill.storing import PROGRESS, Block, StoragePlan, StoredTargets, Targets, TargetWriter

TOKENS, K = 50, 3


def a_block(positions: list[int], vocab_size: int = 300) -> Block:
    """Targets that say where they belong."""
    rows = np.array(positions)[:, None] + np.arange(K)
    ids = rows.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    return Block(np.array(positions), Targets(ids, (-rows / 64).astype(np.float16)))


def write_all(folder: Path, blocks: list[list[int]], vocab_size: int = 300) -> None:
    sizes = StoragePlan(folder, 0, K, vocab_size, {}).file_sizes(TOKENS)
    with TargetWriter(folder, sizes) as writer:
        for positions in blocks:
            writer.put(a_block(positions, vocab_size))
        writer.finish()


some_positions = st.lists(st.integers(0, TOKENS - 1), unique=True, min_size=1)


@given(st.lists(some_positions, min_size=1), st.sampled_from([300, 70_000]))
def test_they_are_where_they_belong(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("written")
    write_all(folder, blocks, vocab_size)
    assert json.loads((folder / PROGRESS).read_text())["done"] == sum(map(len, blocks))
    found = StoredTargets(folder, TOKENS, K, vocab_size).at(np.arange(TOKENS))
    written = {position for positions in blocks for position in positions}
    for position in range(TOKENS):
        there = np.arange(position, position + K) if position in written else np.zeros(K)
        assert found.ids[position].tolist() == there.tolist()
        assert found.logs[position].tolist() == (-there / 64).tolist()


def test_neighbours_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []

    def write(_: Any, offset: int, values: np.ndarray) -> None:
        runs.append((offset // values[0].nbytes, len(values)))

    monkeypatch.setattr(storing, "_write_at", write)
    write_all(tmp_path, [[7, 8, 9, 3, 4, 0]])
    assert runs == [(7, 3), (7, 3), (3, 2), (3, 2), (0, 1), (0, 1)], "each into both files"


@pytest.mark.parametrize("fails", ["_write_at", "write_json"])
def test_a_full_disk_is_an_error_of_the_caller(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread meets it."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storing, fails, full)
    monkeypatch.setattr(storing, "SAVED_EVERY", 0)
    with pytest.raises(BraidError, match="the disk is full"), explained_disk_errors(tmp_path):
        write_all(tmp_path, [[index] for index in range(TOKENS)])
    assert not (tmp_path / PROGRESS).exists()


def test_what_is_not_written_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is saved."""
    monkeypatch.setattr(storing, "SAVED_EVERY", 0)
    write, written = TargetWriter._write, 0
    save, saved = TargetWriter._save, []

    def counts(self: TargetWriter, block: Block) -> int:
        nonlocal written
        count = write(self, block)
        written += count
        return count

    def checks(self: TargetWriter, done: int) -> None:
        saved.append(written - done)
        save(self, done)

    monkeypatch.setattr(TargetWriter, "_write", counts)
    monkeypatch.setattr(TargetWriter, "_save", checks)
    write_all(tmp_path, [[index % TOKENS, (index + 1) % TOKENS] for index in range(200)])
    assert len(saved) > 1
    assert min(saved) >= 0
