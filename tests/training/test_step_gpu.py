"""The fused, the compiled and the graph-replayed step on a GPU against plain operations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.model import modeling_braid
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Amount
from braidlm.training.parallel import Rank
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step import Stepper
from tiny_models import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Steps by torch's own operations, launched one by one."""

    def run(**options: Any) -> list[float]:
        with monkeypatch.context() as patched:
            patched.setattr(modeling_braid, "pays", lambda *_: False)
            return losses(graph=False, compiled=False, **options)

    return run


def losses(graph: bool, compiled: bool, accumulation: int = 1, checkpointing: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = BraidForCausalLM(tiny_config()).cuda()
    config = TrainingConfig(
        budget=Amount(10),
        batch=4,
        accumulation=accumulation,
        graph=graph,
        compile=compiled,
        activation_checkpointing=checkpointing,
    )
    stepper = Stepper(model, config, Rank(0, 1, torch.device("cuda")), torch.float32)
    random = np.random.default_rng(0)
    found = []
    for index in range(8):
        tokens = random.integers(1, model.config.vocab_size, (4 * accumulation, 17))
        labels = tokens[:, 1:].copy()
        if index == 5:
            labels[0, 3:] = -100  # a cut batch, of another count, through the same graph
        count = int((labels != -100).sum())
        report = stepper.step(tokens[:, :-1].copy(), labels, count, 1e-2 / (index + 1))
        loss, norm = report.loss, report.gradient_norm
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("graph", "compiled"), [(False, False), (True, False), (True, True), (False, True)])
def test_fast_steps_equal_plain_ones(
    graph: bool, compiled: bool, accumulation: int, plainly: Callable[..., list[float]]
) -> None:
    plain = plainly(accumulation=accumulation)
    assert losses(graph, compiled, accumulation) == pytest.approx(plain, rel=2e-4)


def test_checkpointing_inside_a_graph_equals_plain_steps(plainly: Callable[..., list[float]]) -> None:
    assert losses(graph=True, compiled=False, checkpointing=True) == pytest.approx(plainly(), rel=2e-4)
