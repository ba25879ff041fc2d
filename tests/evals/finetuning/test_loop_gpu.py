"""Captured steps on a GPU against steps that are launched one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.models.folders import load_model
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.loop import fine_tune, hyperparameters_for
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.tasks import TASKS
from tests.evals.labelled_examples import STACKED, TOKENIZER, average_of, evaluated, write_answerable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["plain", "stacked", "average"])
def test_replayed_steps_are_the_same_steps(tmp_path: Path, method: Any, kind: str) -> None:
    if method == "lora":
        pytest.importorskip("peft")
    task = TASKS["glue_sst2"]().open(write_answerable(tmp_path))
    settings = Settings(finetune=method, finetune_epochs=4, finetune_batch_size=16, finetune_learning_rate=5e-3)
    if kind == "average":
        language_model = load_model(average_of(tmp_path, [{}, {}])[0])
    else:
        language_model = evaluated(**(STACKED if kind == "stacked" else {})).model
    model = EvaluatedModel(Scorer(language_model.cuda()), TOKENIZER, settings=settings)
    hyperparameters = hyperparameters_for("sst2", settings)
    tokenized = task.tokenize(model, hyperparameters)
    replayed, launched = (
        fine_tune(model.model, tokenized, hyperparameters, 42, replay=replay) for replay in (True, False)
    )
    assert replayed.replayed
    assert not launched.replayed
    assert replayed.losses == pytest.approx(launched.losses, rel=0.05, abs=0.01)
    assert replayed.scores[-1] == pytest.approx(launched.scores[-1], abs=5)
