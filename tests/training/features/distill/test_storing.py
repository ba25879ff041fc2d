"""Targets that are stored: those of the teachers, at every position, whatever happens while they are written."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.training.features.distill import storing
from braidlm.training.features.distill.storing import IDS, LOGS, MANIFEST, PROGRESS, StoragePlan, open_targets
from braidlm.training.features.distill.teachers import Teachers
from tests.training.features.distill.teaching import braid_teacher

CPU, LENGTH, K, VOCABULARY = torch.device("cpu"), 16, 5, 300


@pytest.fixture(scope="module")
def teachers(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Teachers:
    folder = tmp_path_factory.mktemp("storing")
    models = [load_model(braid_teacher(folder / name, stories, seed)) for seed, name in enumerate("ab")]
    return Teachers(models, [0.5, 0.5], VOCABULARY, 2.0)


@pytest.fixture
def stream(stories: Path) -> TokenStream:
    return TokenStream(PackedData(stories), Subset(0.0, 0.15), "stories")


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences at a time, so that there are several blocks."""
    monkeypatch.setattr(storing, "slices_of", lambda rows, *_: [slice(i, i + 40) for i in range(0, rows, 40)])


def plan(cache: Path, **facts: Any) -> StoragePlan:
    return StoragePlan(cache, LENGTH, K, VOCABULARY, {"teachers": ["a", "b"], **facts})


def all_positions(stream: TokenStream) -> np.ndarray:
    return stream.positions(np.arange(len(stream)), 1)


def test_every_position_has_the_teachers_best(teachers: Teachers, stream: TokenStream, tmp_path: Path) -> None:
    targets = open_targets([stream], plan(tmp_path), lambda: teachers, CPU)["stories"]
    positions = all_positions(stream)
    for index in (0, 1, LENGTH // 2, 777, len(stream) - 1):
        # At least half a sequence before it, and the text after it plays no part.
        begin = index - LENGTH // 2 - index % (LENGTH // 2)
        tokens = stream.tokens_at(stream.positions(np.array([begin % len(stream)]), index - begin + 1))
        expected = teachers.log_probabilities(torch.from_numpy(tokens))[0, -1].topk(K)
        found = targets.at(positions[index][None])
        assert found.ids[0, 0].tolist() == expected.indices.tolist()
        np.testing.assert_allclose(found.logs[0, 0], expected.values.numpy(), atol=5e-3)


def test_what_is_there_is_not_computed_again(teachers: Teachers, stream: TokenStream, tmp_path: Path) -> None:
    first = open_targets([stream], plan(tmp_path), lambda: teachers, CPU)["stories"]
    again = open_targets([stream], plan(tmp_path), lambda: pytest.fail("teachers were loaded"), CPU)["stories"]
    positions = all_positions(stream)
    assert all(np.array_equal(a, b) for a, b in zip(first.at(positions), again.at(positions), strict=True))


def test_a_killed_process_goes_on(
    teachers: Teachers, stream: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what was saved when it was killed: what was written and not saved, or only in part, is computed again."""

    class Killed(Exception): ...

    whole = open_targets([stream], plan(tmp_path / "whole"), lambda: teachers, CPU)["stories"]
    folder = plan(tmp_path / "parts").folder(stream)
    monkeypatch.setattr(storing, "SAVED_EVERY", 0)
    monkeypatch.setattr(storing, "MAX_WAITING", 0)
    calls = []
    read = Teachers.log_probabilities

    def dies(self: Teachers, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        calls.append(len(ids))
        if len(calls) == 4:
            raise Killed
        while len(calls) > 1 and not (folder / PROGRESS).exists():
            time.sleep(0.01)
        return read(self, ids, start)

    monkeypatch.setattr(Teachers, "log_probabilities", dies)
    with pytest.raises(Killed):
        open_targets([stream], plan(tmp_path / "parts"), lambda: teachers, CPU)
    assert not (folder / MANIFEST).exists()
    done, block = json.loads((folder / PROGRESS).read_text())["done"], 40 * LENGTH // 2
    assert done in (block, 2 * block, 3 * block)
    first = all_positions(stream)[done, 0]
    for name, row in ((IDS, 2 * K), (LOGS, 2 * K)):
        with open(folder / name, "r+b") as file:
            file.seek(first * row)
            file.write(b"\x07" * 3 * row)
    calls.clear()
    monkeypatch.setattr(Teachers, "log_probabilities", lambda *a: calls.append(len(a[1])) or read(*a))
    parts = open_targets([stream], plan(tmp_path / "parts"), lambda: teachers, CPU)["stories"]
    assert sum(calls) == -(-(len(stream) - done) // (LENGTH // 2)), "no sequence of what was saved is read again"
    positions = all_positions(stream)
    assert all(np.array_equal(a, b) for a, b in zip(whole.at(positions), parts.at(positions), strict=True))
    assert not (folder / PROGRESS).exists()


def test_the_folder_depends_on_all_that_counts(stream: TokenStream, stories: Path, tmp_path: Path) -> None:
    base = plan(tmp_path)
    others = [
        plan(tmp_path, temperature=3.0).folder(stream),
        StoragePlan(tmp_path, LENGTH * 2, K, VOCABULARY, base.facts).folder(stream),
        StoragePlan(tmp_path, LENGTH, K + 1, VOCABULARY, base.facts).folder(stream),
        base.folder(TokenStream(stream.data, Subset(0.0, 0.4), "stories")),
    ]
    assert len({base.folder(stream), *others}) == 5
    assert plan(tmp_path).folder(TokenStream(PackedData(stories), Subset(0.0, 0.15), "stories")) == base.folder(stream)


def test_documents_that_are_not_trained_on_take_no_space(
    teachers: Teachers, stream: TokenStream, tmp_path: Path
) -> None:
    open_targets([stream], plan(tmp_path), lambda: teachers, CPU)
    path = plan(tmp_path).folder(stream) / "logs.bin"
    assert path.stat().st_size == stream.data.manifest.tokens * K * 2
    assert path.stat().st_blocks * 512 < path.stat().st_size


def test_a_damaged_folder_and_a_full_disk(
    teachers: Teachers, stream: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_targets([stream], plan(tmp_path), lambda: teachers, CPU)
    path = plan(tmp_path).folder(stream) / "ids.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BraidError, match="damaged"):
        open_targets([stream], plan(tmp_path), lambda: teachers, CPU)

    class Usage:
        free = 10

    monkeypatch.setattr(storing.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(BraidError, match="are free"):
        open_targets([stream], plan(tmp_path / "full"), lambda: teachers, CPU)
