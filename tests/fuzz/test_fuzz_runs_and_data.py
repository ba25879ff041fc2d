"""Run folders and packed data that were damaged or made to harm: shown, read and gone on with, or refused."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from braidlm.cli.main import main
from braidlm.core.files import sha256_of, write_json
from braidlm.core.reading import read_json
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.config import DataConfig
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import open_data
from braidlm.data.packing.prepare import prepare
from braidlm.model.config.strict import decode
from braidlm.training.train import train
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import as_json, changed, damaged, seeded

MODEL = {"width": 8, "context": 16, "stages": ["block"], "block": {"attention": {"heads": 2}, "feed": {"hidden": 8}}}
TRAINING = {"budget": "2 steps", "batch": 2, "warmup": "1 steps"}
Copies = Callable[[], Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare("stories", folder, documents=12, tokenizer="bytes", workers=1)
    return folder


def recipe_for(packed: Path, out: Path) -> dict[str, Any]:
    data = {"length": 16, "sets": {"stories": {"path": str(packed), "holdout": 0.2}}}
    checkpoints, validation = {"every": "1 steps"}, {"tokens": 64}
    return {
        **{"name": "tiny", "out": str(out), "model": MODEL, "data": data, "training": TRAINING},
        **{"checkpoints": checkpoints, "validation": validation, "log": {"every": 1}},
    }


@pytest.fixture(scope="module")
def run(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which goes on where it was damaged."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe_for(packed, folder), device="cpu")
    return folder


@pytest.fixture(scope="module")
def run_copy(run: Path) -> Copies:
    return copies_of(run)


@pytest.fixture(scope="module")
def packed_copy(packed: Path) -> Copies:
    return copies_of(packed)


def copies_of(folder: Path) -> Copies:
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(folder, folder.parent / f"copy-{next(numbers)}"))


def spoil(path: Path, data: st.DataObject) -> None:
    """One file, as plain data where it is, or as bytes."""
    as_plain = data.draw(st.booleans())
    if as_plain and path.suffix == ".json":
        path.write_bytes(as_json(data.draw(changed(read_json(path)))))
    elif as_plain and path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(data.draw(changed(yaml.safe_load(path.read_text())))), errors="replace")
    else:
        path.write_bytes(data.draw(damaged(path.read_bytes())))


def spoilable(folder: Path) -> list[str]:
    """The files of a folder that are read again, by their paths in it."""
    kinds = (".json", ".jsonl", ".yaml", ".safetensors", ".bin")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in kinds)


@seeded(32)
@given(st.data())
def test_a_run_folder_that_was_changed(packed: Path, run: Path, run_copy: Copies, data: st.DataObject) -> None:
    folder = run_copy()
    path = folder / data.draw(st.sampled_from(spoilable(run)))
    spoil(path, data)
    manifest = path.parent / "manifest.json"
    if "states" in path.parts and path != manifest and data.draw(st.booleans()):  # by somebody who knew of the hashes
        record = read_json(manifest)
        record["files"][path.name] = sha256_of(path)
        write_json(manifest, record)
    with honest():
        assert main(["show", str(folder), "--json"]) in (0, 2)
    with honest():
        train(recipe_for(packed, folder), device="cpu")
    shutil.rmtree(folder)


@seeded(150)
@given(st.data())
def test_packed_data_that_was_changed(packed: Path, packed_copy: Copies, data: st.DataObject) -> None:
    folder = packed_copy()
    spoil(folder / data.draw(st.sampled_from(spoilable(packed))), data)
    with honest():
        assert main(["show", str(folder), "--json"]) in (0, 2)
    with honest():
        read(folder)
    shutil.rmtree(folder)


def read(folder: Path) -> None:
    """A few batches; every id has a row of the embedding."""
    config = decode(DataConfig, {"length": 16, "sets": {"x": {"path": str(folder), "holdout": 0.2}}})
    opened = open_data(config)
    loader = Loader(opened.train, chunkings.build(config.chunking), config.length, rows=2, seed=1)
    for _ in range(40):
        assert int(loader.next_batch().inputs.max()) < opened.tokenizer.vocab_size
