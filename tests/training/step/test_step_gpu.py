"""The lowered, the compiled and the graph-replayed step on a GPU against plain operations, launched one by one."""

import numpy as np
import pytest
import torch

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import freeze
from braidlm.training.amounts import Amount
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def losses(graph: bool, compiled: bool | None, accumulation: int = 1, checkpointing: bool = False) -> list[float]:
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
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, torch.device("cuda")), torch.float32)
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
@pytest.mark.parametrize(("graph", "compiled"), [(True, None), (True, False), (True, True), (False, True)])
def test_fast_steps_equal_plain_ones(graph: bool, compiled: bool | None, accumulation: int) -> None:
    plain = losses(graph=False, compiled=False, accumulation=accumulation)
    assert losses(graph, compiled, accumulation) == pytest.approx(plain, rel=2e-4)


def test_checkpointing_inside_a_graph_equals_plain_steps() -> None:
    plain = losses(graph=False, compiled=False)
    assert losses(graph=True, compiled=False, checkpointing=True) == pytest.approx(plain, rel=2e-4)


def test_kernels_serve_a_replayed_step_and_no_other() -> None:
    model = BraidForCausalLM(tiny_config()).cuda()
    rank = Rank(0, 1, torch.device("cuda"))
    for options, lowered in (({}, True), ({"graph": False}, False), ({"compile": True}, False)):
        stepper = Stepper(
            TrainableBraid(model), TrainingConfig(budget=Amount(1), batch=2, **options), rank, torch.float32
        )
        assert (stepper.lowered is not None) == lowered


def inserted_losses(graph: bool, compiled: bool | None) -> tuple[list[float], BraidForCausalLM]:
    """Steps of a model with a new module that opens from step to step, all others frozen."""
    torch.manual_seed(0)
    experts = {"names": 3, "router": {"top_k": 1, "new": ["expert_3"], "compute": "sparse"}}
    block = {"attention": {"heads": 2}, "feed": {"hidden": 8, "experts": experts}}
    model = BraidForCausalLM(tiny_config(stages=["block"], block=block)).cuda()
    freeze(model, ["blocks", "routers", "embedding", "head"])
    config = TrainingConfig(budget=Amount(8), batch=4, graph=graph, compile=compiled, opening=1.0)
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, torch.device("cuda")), torch.float32)
    random, found = np.random.default_rng(0), []
    for index in range(8):
        tokens = random.integers(1, model.config.vocab_size, (4, 17))
        for one in stepper.features:
            one.read_batch(None, (index + 1) / 8)  # type: ignore[arg-type]
        report = stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), 64, 1e-2)
        found += [report.loss.item(), report.gradient_norm.item()]
    return found, model


@pytest.mark.parametrize(("graph", "compiled"), [(True, None), (True, False), (False, True)])
def test_inserted_modules_open_between_replays(graph: bool, compiled: bool | None) -> None:
    plain, reference = inserted_losses(graph=False, compiled=False)
    fast, model = inserted_losses(graph, compiled)
    assert fast == pytest.approx(plain, rel=2e-4)
    bank, same = (m.model.stages[0].layers[0].feed.bank.out.weight for m in (model, reference))
    assert torch.equal(bank[:2], same[:2])
    assert not torch.equal(bank[2], bank[1])
