"""Training needs no Triton."""

import sys

from tests.without_braid import run_without_braid

SCRIPT = """
sys.meta_path.pop(0)  # here Braid is to be found
sys.path[:0] = sys.argv[1:]
parts = [name for name in sys.modules if name.startswith("triton.")]  # torch imports what there is
sys.modules |= dict.fromkeys(["triton", *parts])  # an import of it fails

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
    assert run_without_braid(SCRIPT, *filter(None, sys.path)).strip() == "True"
