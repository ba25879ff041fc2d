"""Model folders that were damaged or made to harm: shown and continued with, or refused."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidlm.cli.main import main
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import save_model
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluate import open_to_score
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import HOSTILE, as_json, changed, damaged, seeded
from tests.tiny_models import tiny_model

MODEL_FILES = ("config.json", "generation_config.json", "lineage.json", "tokenizer_config.json", "tokenizer.json")
USES = st.sampled_from(["show", "generate", "generate", "eval"])
GENERATE = ("a", "--max-tokens", "2", "--device", "cpu", "--top-next", "1")
PARALLEL = {"parallel": {"layers": 1, "paths": ["a", "b"], "join": {"kind": "routed", "top_k": 1}}}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with routed paths, so that its configuration has names and nested options."""
    tokenizer = bytes_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, stages=["block", PARALLEL])
    lineage = {"made_by": "a test", "training": {"steps": 7, "words": 70}, "sources": [{"data": "x", "tokens": 5}]}
    return save_model(model, tmp_path_factory.mktemp("good") / "toy", tokenizer, lineage)


@pytest.fixture(scope="module")
def with_file(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """The folder again and again, with one file replaced."""
    parent, numbers = tmp_path_factory.mktemp("changed"), itertools.count()

    def replaced(name: str, content: bytes) -> Path:
        folder = parent / str(next(numbers))
        folder.mkdir()
        for path in good.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path)
        (folder / name).write_bytes(content)
        return folder

    return replaced


def used(folder: Path, verb: str) -> None:
    """One way to use it gives a result, or says what is wrong with exit code 2."""
    with honest():
        if verb == "eval":
            open_to_score([folder])
        else:
            assert main([verb, str(folder), *(GENERATE if verb == "generate" else ()), "--json"]) in (0, 2)
    shutil.rmtree(folder)


@seeded(150)
@given(st.data())
def test_json_that_was_changed(good: Path, with_file: Callable[[str, bytes], Path], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from((*MODEL_FILES, "config.json")))
    value: Any = data.draw(changed(read_json(good / name)))
    used(with_file(name, as_json(value)), data.draw(USES))


@seeded(60)
@given(st.sampled_from(MODEL_FILES), st.sampled_from(HOSTILE), USES)
def test_json_that_is_something_else(with_file: Callable[[str, bytes], Path], name: str, value: Any, verb: str) -> None:
    used(with_file(name, as_json(value)), verb)


@seeded(60)
@given(st.data())
def test_json_that_was_damaged(good: Path, with_file: Callable[[str, bytes], Path], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(MODEL_FILES))
    used(with_file(name, data.draw(damaged((good / name).read_bytes()))), data.draw(USES))


@seeded(80)
@given(st.data())
def test_weights_that_were_damaged(good: Path, with_file: Callable[[str, bytes], Path], data: st.DataObject) -> None:
    """Mostly in the header, which says where each tensor is; half of them with a lineage that knows their hash."""
    content = (good / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    most = data.draw(st.sampled_from([8, header, header, header, len(content)]))
    folder = with_file("model.safetensors", data.draw(damaged(content, most)))
    if data.draw(st.booleans()):
        lineage = read_json(good / "lineage.json")
        lineage["weights"]["sha256"] = sha256_of(folder / "model.safetensors")
        (folder / "lineage.json").unlink()
        (folder / "lineage.json").write_bytes(as_json(lineage))
    used(folder, data.draw(USES))
