"""Teachers of both kinds, averaged, and the errors of those that cannot teach."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.packing.prepare import prepare
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.model.config.strict import decode
from braidlm.training.features.distill.teachers import DistillConfig, Teachers, find_teachers
from tests.tiny_models import random_ids
from tests.training.features.distill.teaching import braid_teacher, transformers_teacher

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return braid_teacher(folder / "braid", stories), transformers_teacher(folder / "gpt2", stories)


def config(*teachers: Any, **options: Any) -> DistillConfig:
    return decode(DistillConfig, {"teachers": [t if isinstance(t, dict) else str(t) for t in teachers], **options})


def test_probabilities_of_both_kinds_are_averaged(both: tuple[Path, Path], stories: Path) -> None:
    tokenizer = load_tokenizer(stories)
    asked = config({"model": str(both[0]), "weight": 3}, both[1])
    found = find_teachers(asked, tokenizer, 16)
    assert [teacher.weight for teacher in found] == [0.75, 0.25]
    teachers = Teachers([t.load(CPU, torch.float32) for t in found], [0.75, 0.25], tokenizer.vocab_size, 2.0)
    ids = random_ids(2, 16, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        one, other = (
            model(ids).logits for model in (load_model(both[0]), AutoModelForCausalLM.from_pretrained(both[1]))
        )
    expected = 0.75 * (one / 2).softmax(-1) + 0.25 * (other / 2).softmax(-1)
    said, hidden = teachers.read(ids)
    torch.testing.assert_close(said.exp(), expected, rtol=1e-4, atol=1e-6)
    assert [state.shape[-1] for state in hidden] == teachers.widths == [16, 12]


def test_the_end_of_a_row_is_that_of_the_whole(both: tuple[Path, Path], stories: Path) -> None:
    """Whether or not a model can be asked for the logits of the end alone."""
    found = find_teachers(config(*both), load_tokenizer(stories), 16)
    models = [teacher.load(CPU, torch.float32) for teacher in found]
    all_of_them = models[1].forward
    models[1].forward = lambda input_ids, use_cache: all_of_them(input_ids, use_cache=use_cache)
    teachers = Teachers(models, [0.5, 0.5], 300, 2.0)
    ids = random_ids(2, 16, vocab_size=300)
    whole = teachers.log_probabilities(ids)
    torch.testing.assert_close(teachers.log_probabilities(ids, 9), whole[:, 9:])
    models[1].forward = all_of_them
    torch.testing.assert_close(teachers.log_probabilities(ids, 9), whole[:, 9:])


def test_teachers_are_frozen(both: tuple[Path, Path], stories: Path) -> None:
    for teacher in find_teachers(config(*both), load_tokenizer(stories), 16):
        model = teacher.load(CPU, torch.float32)
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_record_says_which_model_it_was(both: tuple[Path, Path], stories: Path, tmp_path: Path) -> None:
    one, other = (teacher.record() for teacher in find_teachers(config(*both), load_tokenizer(stories), 16))
    assert one["model"] == "braid"
    assert one["role"] == "teacher"
    assert one["sha256"] != other["sha256"]


@pytest.mark.parametrize("make", [braid_teacher, transformers_teacher])
def test_another_tokenizer_is_refused(make: Any, stories: Path, tmp_path: Path) -> None:
    prepare("maths", tmp_path / "maths", documents=60, tokenizer="bpe", vocab_size=310, workers=1)
    teacher = make(tmp_path / "teacher", tmp_path / "maths")
    with pytest.raises(BraidError) as error:
        find_teachers(config(teacher), load_tokenizer(stories), 16)
    text = str(error.value)
    assert str(teacher) in text
    assert "another tokenizer" in text
    assert "the vocabularies have 300 and 310 tokens" in text
    assert "id " in text, "the first tokens that differ are named"
    assert f"data.tokenizer={teacher}" in text


def test_other_bad_teachers(both: tuple[Path, Path], stories: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(stories)
    with pytest.raises(BraidError, match="reads only 32 tokens"):
        find_teachers(config(both[0]), tokenizer, 33)
    with pytest.raises(BraidError, match="reads only 64 tokens"):
        find_teachers(config(both[1]), tokenizer, 65)
    bare = transformers_teacher(tmp_path / "bare", stories)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BraidError, match="no tokenizer"):
        find_teachers(config(bare), tokenizer, 16)
    with pytest.raises(BraidError, match="there is no"):
        find_teachers(config(tmp_path / "nothing"), tokenizer, 16)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"teachers": []}, "name at least one"),
        ({"teachers": ["a"], "weight": 1.5}, "weight"),
        ({"teachers": ["a"], "temperature": 0}, "temperature"),
        ({"teachers": ["a"], "top_k": 0}, "top_k"),
        ({"teachers": ["a"], "top_k": 4, "hidden": 0.1}, "not stored"),
        ({"teachers": [{"model": "a", "weight": 0}]}, "weight"),
    ],
)
def test_bad_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(BraidError, match=problem):
        decode(DistillConfig, options)
