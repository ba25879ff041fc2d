"""Steps of the hybrid objective on a GPU: compiled and replayed as a graph against plain operations."""

from typing import Any

import numpy as np
import pytest
import torch

from braidlm.model.config.registry import Choice
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Amount
from braidlm.training.features.losses.masked import Masked, MaskedConfig
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, tiny_config
from tests.training.features.losses.text_batches import batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXPERTS = {"kind": "mlp", "hidden": 16, "experts": {"names": 3, "router": {"compute": "dense"}}}


def losses(graph: bool, compiled: bool, accumulation: int, device: str = "cuda", **block: Any) -> list[float]:
    torch.manual_seed(0)
    model = BraidForCausalLM(tiny_config(block=block)).to(device)
    config = TrainingConfig(
        budget=Amount(10),
        batch=4,
        accumulation=accumulation,
        graph=graph,
        compile=compiled,
        losses=[Choice("masked", MaskedConfig())],
    )
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, torch.device(device)), torch.float32)
    masked = stepper.extra["masked"]
    assert isinstance(masked, Masked)
    assert stepper.lowered is None
    masked.token, masked.ordinary = VOCABULARY - 1, np.arange(VOCABULARY - 1)
    found = []
    for step in range(8):
        rows = 4 * accumulation
        lengths = [16] * (rows - 1) + [3] if step == 5 else None  # a cut batch through the same graph
        stepper.begin_step(step, step / 8)
        batch = stepper.read_batch(batch_of(rows, 16, lengths, seed=step), (step + 1) / 8)
        report = stepper.step(batch.inputs, batch.labels, batch.target_count, 1e-2)
        found += [number.item() for number in (report.loss, report.extra["masked"], report.gradient_norm)]
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("graph", "compiled"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("block", [{}, {"feed": EXPERTS}])
def test_fast_steps_equal_plain_ones(graph: bool, compiled: bool, accumulation: int, block: dict[str, Any]) -> None:
    plain = losses(False, False, accumulation, **block)
    assert losses(graph, compiled, accumulation, **block) == pytest.approx(plain, rel=5e-4)
