"""Training needs no Triton."""

import os
import subprocess
import sys

SCRIPT = """
import sys

sys.modules["triton"] = None  # an import of it fails

import numpy as np
import torch

from braidlm.kernels.lower import lower
from braidlm.training.amounts import Amount
from braidlm.training.step.parallel import Rank
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import tiny_model

model = tiny_model()
assert lower(model, torch.float32) is None
rank = Rank(0, 1, torch.device("cpu"))
stepper = Stepper(TrainableBraid(model), TrainingConfig(budget=Amount(1), batch=2), rank, torch.float32)
tokens = np.zeros((2, 4), np.int64)
print(stepper.step(tokens, tokens, 8, 1e-3).loss.isfinite().item())
"""


def test_training_works_without_triton() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr[-2000:]
