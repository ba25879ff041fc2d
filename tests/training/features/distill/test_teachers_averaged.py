"""An averaged folder teaches what its models teach together: the same probabilities, loss and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.models.folders import load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.model.heads.losses import IGNORED
from braidlm.training.features.distill.distillation import OnlineDistillation
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers
from braidlm.training.features.extra_losses import TrainingPass
from tests.tiny_models import random_ids, tiny_model

TOKENIZER = bytes_tokenizer()
SIZE = TOKENIZER.vocab_size


@pytest.fixture(scope="module", params=[[{}, {}, {}], [{}, {"width": 24}]], ids=["stacked", "two widths"])
def teachers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any]:
    """Models, and the average that they are composed into."""
    home: Path = tmp_path_factory.mktemp("teachers")
    folders = []
    for seed, options in enumerate(request.param):
        model = tiny_model(seed=seed, vocab_size=SIZE, **options)
        folders.append(save_model(model, home / f"teacher-{seed}", TOKENIZER, {}))
    averaged = compose(folders, home / "averaged", join="average")
    assert averaged is not None
    return [load_model(folder) for folder in folders], load_model(averaged)


def distilled(models: list[Any], student: Any, inputs: Tensor) -> list[Tensor]:
    """The loss of a student and its gradients."""
    labels = inputs.roll(-1, 1)
    labels[:, -1] = IGNORED
    several = Teachers(models, [1 / len(models)] * len(models), SIZE, 1.0)
    loss = OnlineDistillation(DistillConfig([TeacherConfig("a")]), student, several)
    hidden = student.model(inputs, use_cache=False).last_hidden_state
    found = loss(TrainingPass(student, inputs, labels, torch.tensor(20.0), hidden))
    return [found, *torch.autograd.grad(found, list(student.parameters()))]


def test_they_say_the_same(teachers: tuple[list[Any], Any]) -> None:
    models, averaged = teachers
    inputs = random_ids(3, 9, vocab_size=SIZE)
    together = Teachers(models, [1 / len(models)] * len(models), SIZE, 1.0).log_probabilities(inputs)
    alone = Teachers([averaged], [1.0], SIZE, 1.0).log_probabilities(inputs)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    torch.testing.assert_close(averaged(inputs).logits, together, rtol=0, atol=1e-5)


def test_a_student_learns_the_same(teachers: tuple[list[Any], Any]) -> None:
    models, averaged = teachers
    inputs = random_ids(3, 9, vocab_size=SIZE)
    student = tiny_model(seed=9, vocab_size=SIZE).train()
    for one, other in zip(distilled(models, student, inputs), distilled([averaged], student, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
