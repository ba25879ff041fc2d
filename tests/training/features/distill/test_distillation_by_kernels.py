"""Distillation in the lowered pass against the plain one: losses, gradients, and when it falls back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
import torch
from torch import nn

from braidlm.kernels.lowered_model import LoweredModel
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training import trainable
from braidlm.training.amounts import Amount
from braidlm.training.features.distill import teachers as teachers_of_runs
from braidlm.training.features.distill.distillation import OnlineDistillation, StoredDistillation
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers
from braidlm.training.features.extra_losses import ExtraLoss, ExtraLossConfig
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.objective import Objective
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, random_ids, tiny_model
from tests.training.features.distill.teaching import stored_targets

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # or Triton's interpreter
NARROW = {"width": 12, "block": {"attention": {"heads": 2}}}
ROUTED = {
    "positions": "learned",
    "block": {
        "norm": "layer",
        "attention": {"heads": 1},
        "feed": {"kind": "mlp", "experts": {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}},
    },
}
STUDENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_embeddings": True},
    "routed": ROUTED,
    "with entries of no token": {"vocab_size": VOCABULARY + 3},
}
WEIGHED = [pytest.param(STUDENTS[name], 0.7, id=name) for name in STUDENTS]
WEIGHED += [pytest.param(STUDENTS[name], 1.0, id=f"{name}, by teachers alone") for name in ("tied", "routed")]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve teachers in float32, and also in Triton's interpreter."""
    monkeypatch.setattr(teachers_of_runs, "lower_forward", lambda model, dtype: LoweredModel(model))


def two_teachers(temperature: float = 1.0) -> Teachers:
    """Of different widths."""
    models = [tiny_model(seed=2).to(DEVICE), tiny_model(seed=3, **NARROW).to(DEVICE)]
    return Teachers(models, [0.4, 0.6], VOCABULARY, temperature)


def plain_teachers() -> Teachers:
    teachers = two_teachers()
    teachers.lowered = []
    return teachers


def distillation(model: BraidForCausalLM, teachers: Teachers, **options: Any) -> OnlineDistillation:
    return OnlineDistillation(DistillConfig([TeacherConfig("a")], **options), model, teachers)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("student", "weight"), WEIGHED)
def test_the_lowered_objective_equals_the_plain_one(student: dict[str, Any], weight: float) -> None:
    model = tiny_model(seed=1, **student).to(DEVICE).train()
    inputs, labels = random_ids(3, 8).to(DEVICE), random_ids(3, 8, seed=1).to(DEVICE)
    labels[1, 2:] = IGNORED
    count = torch.tensor(20.0, device=DEVICE)
    lowered = Objective(model, LoweredModel(model), {"distill": distillation(model, two_teachers(), weight=weight)})
    plain = Objective(model, None, {"distill": distillation(model, plain_teachers(), weight=weight)})
    found, expected = lowered(inputs, labels, count), plain(inputs, labels, count)
    torch.testing.assert_close(found.text, expected.text, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.extra, expected.extra, rtol=1e-5, atol=1e-6)
    whole = (1 - weight) * expected.text + weight * expected.extra["distill"]
    torch.testing.assert_close(found.weighted, whole, rtol=1e-5, atol=1e-6)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found.weighted, whole)]
    for name, one, other in zip(names, *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_lowered_teachers_say_the_same_of_the_end_of_a_row(temperature: float) -> None:
    lowered, plain = two_teachers(temperature), two_teachers(temperature)
    plain.lowered = []
    ids = random_ids(3, 8).to(DEVICE)
    expected = plain.log_probabilities(ids)[:, 5:]
    torch.testing.assert_close(lowered.log_probabilities(ids, 5), expected, rtol=1e-5, atol=1e-5)


class OneBatch:
    """The only one, whose rows are the first of their text."""

    class whole:
        own_sources = np.zeros(3)
        positions = np.arange(24).reshape(3, 8)


@pytest.mark.parametrize(("student", "weight"), WEIGHED)
def test_stored_targets_in_the_lowered_objective(student: dict[str, Any], weight: float, tmp_path: Path) -> None:
    """They are read in the order of micro-batches there too."""
    model = tiny_model(seed=1, **student).to(DEVICE).train()
    inputs, labels = random_ids(3, 8).to(DEVICE), random_ids(3, 8, seed=1).to(DEVICE)
    labels[1, 2:] = IGNORED
    stored = stored_targets(tmp_path, plain_teachers().log_probabilities(inputs).flatten(0, 1), 5)
    config = DistillConfig([TeacherConfig("a")], weight=weight, top_k=5)
    losses = {}
    for name, lowered in (("kernels", LoweredModel(model)), ("plain", None)):
        loss = StoredDistillation(config, model, {"stories": stored}, (3, 8, 5))
        assert loss.has_soft_targets
        loss.read_batch(OneBatch)  # type: ignore[arg-type]
        objective, count = Objective(model, lowered, {"distill": loss}), torch.tensor(20.0, device=DEVICE)
        parts = [objective(inputs[rows], labels[rows], count) for rows in (slice(0, 1), slice(1, 3))]
        text, distill = sum(part.text for part in parts), sum(part.extra["distill"] for part in parts)
        whole = (1 - weight) * text + weight * distill
        losses[name] = (text, distill, whole if lowered is None else sum(part.weighted for part in parts))
    torch.testing.assert_close(losses["kernels"], losses["plain"], rtol=1e-5, atol=1e-6)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(whole, parameters, allow_unused=True) for *_, whole in losses.values()]
    for name, one, other in zip(names, *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def reports(teachers: Teachers) -> list[float]:
    """Losses, divergences and gradient norms of steps of two micro-batches, the second with a cut batch."""
    model = tiny_model(seed=1, stages=["block"], **ROUTED).to(DEVICE)
    config = TrainingConfig(budget=Amount(2), batch=2, accumulation=2, graph=False, compile=False)
    rank = Rank(0, 1, torch.device(DEVICE))
    stepper = Stepper(TrainableBraid(model), config, rank, torch.float32, [distillation(model, teachers)])
    random, found = np.random.default_rng(0), []
    for index in range(2):
        tokens = random.integers(1, VOCABULARY, (4, 9))
        labels = tokens[:, 1:].copy()
        labels[0, 3:] = IGNORED if index == 1 else labels[0, 3:]
        report = stepper.step(tokens[:, :-1].copy(), labels, int((labels != IGNORED).sum()), 1e-2)
        found += [report.loss.item(), report.extra["distill"].item(), report.routing_loss.item()]
        found += [report.gradient_norm.item()]
    return found


@pytest.mark.usefixtures("kernels")
def test_lowered_steps_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reports(plain_teachers())
    monkeypatch.setattr(Stepper, "_lower", lambda stepper, trained: LoweredModel(trained.model))
    assert reports(two_teachers()) == pytest.approx(plain, rel=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_teachers_by_kernels_say_what_they_say(temperature: float) -> None:
    teachers, ids = two_teachers(temperature), random_ids(3, 8).to(DEVICE)
    assert teachers.lowered
    found = teachers.log_probabilities(ids)
    teachers.lowered = []
    torch.testing.assert_close(found, teachers.log_probabilities(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("options", "capturable", "soft"),
    [({}, True, True), ({"temperature": 2.0}, True, False), ({"hidden": 0.5}, False, False)],
)
def test_only_probabilities_at_temperature_one_are_soft_targets(
    options: dict[str, float], capturable: bool, soft: bool
) -> None:
    """Another temperature is replayed with the plain pass; hidden states are of a pass that no kernel computes."""
    loss = distillation(tiny_model().to(DEVICE), two_teachers(options.get("temperature", 1.0)), **options)
    assert (loss.capturable, loss.has_soft_targets) == (capturable, soft)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "other",
    [
        tiny_model(head={"kind": "linear", "bias": True}),
        tiny_model(stages=[{"mixture_of_depths": {}}]),
        nn.Linear(1, 1),
    ],
    ids=["a head that kernels refuse", "a mixture of depths in evaluation", "another package's model"],
)
def test_one_teacher_that_may_wait_makes_all_plain(other: nn.Module) -> None:
    assert not Teachers([tiny_model(), other], [0.5, 0.5], VOCABULARY, 1.0).lowered


def test_without_bf16_on_a_gpu_teachers_are_plain() -> None:
    assert not two_teachers().lowered


class OtherLoss(ExtraLoss):
    """Reads the plain pass."""

    kind = "other"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("head", "others", "is_lowered"),
    [("linear", [], True), ({"kind": "linear", "bias": True}, [], False), ("linear", [OtherLoss], False)],
    ids=["soft targets", "a head without kernels", "another loss beside"],
)
def test_which_steps_are_lowered(
    head: Any, others: list[type[ExtraLoss]], is_lowered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(seed=1, head=head).to(DEVICE)
    trained = TrainableBraid(model)
    monkeypatch.setattr(trained, "lower", lambda *_, **__: LoweredModel(model))
    monkeypatch.setattr(trainable, "replace_parts", lambda model: None)  # as on a GPU, where the head stays
    features: list[ExtraLoss] = [distillation(model, two_teachers())]
    features += [kind(ExtraLossConfig(), model) for kind in others]
    config = TrainingConfig(budget=Amount(1), batch=2, accumulation=2)
    stepper = Stepper(trained, config, Rank(0, 1, torch.device(DEVICE)), torch.float32, features)
    stepper.use_graph = True  # as on a GPU
    assert (stepper._lower(trained) is not None) == is_lowered
