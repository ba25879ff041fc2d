"""A captured distillation step by kernels on a GPU against plain operations, launched one by one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData
from braidlm.training.amounts import Amount
from braidlm.training.features.distill import storing
from braidlm.training.features.distill.distillation import OnlineDistillation, StoredDistillation
from braidlm.training.features.distill.storing import StoragePlan, open_targets
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.features.distill.teaching import stored_targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXPERTS = {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}
TEACHERS: list[dict[str, Any]] = [
    {"seed": 2, "width": 32},
    {"seed": 3, "block": {"feed": {"kind": "mlp", "hidden": 24, "experts": EXPERTS}}},
]


def a_stepper(by_kernels: bool, accumulation: int = 1, **options: Any) -> Stepper:
    """In bf16; plain steps are neither compiled nor captured."""
    model = tiny_model(seed=1, width=64).cuda()
    models = [tiny_model(torch.bfloat16, **teacher).cuda().requires_grad_(False) for teacher in TEACHERS]
    teachers = Teachers(models, [0.3, 0.7], VOCABULARY, options.get("temperature", 1.0))
    assert teachers.lowered
    if not by_kernels:
        teachers.lowered = []
    loss = OnlineDistillation(DistillConfig([TeacherConfig("a")], **options), model, teachers).cuda()
    plain = {} if by_kernels else {"graph": False, "compile": False}
    config = TrainingConfig(budget=Amount(8), batch=4, accumulation=accumulation, **plain)
    rank = Rank(0, 1, torch.device("cuda"))
    return Stepper(TrainableBraid(model), config, rank, torch.bfloat16, features=[loss])


def reports(stepper: Stepper, reads: StoredDistillation | None = None) -> tuple[list[float], list[float]]:
    """The losses and the gradient norms of eight steps; one is a cut batch, of another count."""
    random, rows = np.random.default_rng(0), 4 * stepper.config.accumulation
    losses, norms = [], []
    for index in range(8):
        tokens = random.integers(1, VOCABULARY, (rows, 17))
        if reads is not None:
            positions = random.integers(0, len(reads.stored[0].ids), (rows, 16))
            reads.read_batch(SimpleNamespace(whole=SimpleNamespace(own_sources=np.zeros(rows), positions=positions)))  # type: ignore[arg-type]
        labels = tokens[:, 1:].copy()
        if index == 5:
            labels[0, 3:] = -100
        report = stepper.step(tokens[:, :-1].copy(), labels, int((labels != -100).sum()), 1e-3)
        losses += [report.loss.item(), report.extra["distill"].item()]
        norms.append(report.gradient_norm.item())
    return losses, norms


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 2.0], ids=["lowered", "captured with the plain pass"])
def test_captured_steps_equal_plain_ones(accumulation: int, temperature: float) -> None:
    fast = a_stepper(True, accumulation, temperature=temperature)
    assert fast.use_graph
    assert (fast.lowered is not None) == (temperature == 1)
    losses, norms = reports(fast)
    assert fast.graph is not None
    expected_losses, expected_norms = reports(a_stepper(False, accumulation, temperature=temperature))
    assert losses == pytest.approx(expected_losses, rel=2e-2)
    assert norms == pytest.approx(expected_norms, rel=5e-2)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_captured_steps_of_stored_targets_equal_plain_ones(accumulation: int, tmp_path: Path) -> None:
    stored = stored_targets(tmp_path, torch.randn(128 * accumulation, VOCABULARY).log_softmax(-1), 6)
    found = {}
    for by_kernels in (True, False):
        model, shape = tiny_model(seed=1, width=64).cuda(), (4 * accumulation, 16, 6)
        loss = StoredDistillation(DistillConfig([TeacherConfig("a")], top_k=6), model, {"stories": stored}, shape)
        plain = {} if by_kernels else {"graph": False, "compile": False}
        config = TrainingConfig(budget=Amount(8), batch=4, accumulation=accumulation, **plain)
        rank = Rank(0, 1, torch.device("cuda"))
        stepper = Stepper(TrainableBraid(model), config, rank, torch.bfloat16, features=[loss])
        assert (stepper.lowered is not None) == by_kernels
        found[by_kernels] = reports(stepper, loss)
        assert (stepper.graph is not None) == by_kernels
    for one, other, tolerance in zip(*found.values(), (2e-2, 5e-2), strict=True):
        assert one == pytest.approx(other, rel=tolerance)


def test_stored_targets_are_what_the_teachers_say(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many blocks, of which several are under way at once."""
    device, (length, vocab_size, k) = torch.device("cuda"), (16, 300, 5)
    monkeypatch.setattr(storing, "MAX_LOGITS_ON_GPU", 40 * length // 2 * vocab_size)
    models = [tiny_model(torch.bfloat16, vocab_size=vocab_size, **teacher).cuda() for teacher in TEACHERS]
    teachers = Teachers([model.eval().requires_grad_(False) for model in models], [0.3, 0.7], vocab_size, 1.0)
    assert teachers.lowered
    stream = TokenStream(PackedData(stories), Subset(0.0, 0.15), "stories")
    plan = StoragePlan(tmp_path, length, k, vocab_size, {})
    found = open_targets([stream], plan, lambda: teachers, device)["stories"]
    begins = np.arange(0, len(stream) - length, length)
    positions = stream.positions(begins, length)
    ids = torch.from_numpy(stream.tokens_at(positions)).to(device)
    half = length // 2  # the second half of these sequences had the same text before it when it was stored
    expected = teachers.log_probabilities(ids, half).cpu()
    at = found.at(positions[:, half:])
    logs = expected.gather(-1, torch.from_numpy(at.ids.astype(np.int64)))
    torch.testing.assert_close(torch.from_numpy(at.logs).float(), logs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(logs, expected.topk(k).values, rtol=2e-2, atol=2e-2)


def test_hidden_states_need_the_plain_pass() -> None:
    stepper = a_stepper(True, hidden=0.5)
    assert not stepper.use_graph
    assert stepper.lowered is None
