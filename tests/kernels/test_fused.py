"""The fused kernels against torch's own operations: in Triton's interpreter here, on the device where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).parent / "fused_cases.py"
WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None  # an import of it fails

import numpy as np
import torch

from braidlm.kernels.planned_pass import has_fused_pass
from braidlm.training.amounts import Amount
from braidlm.training.parallel import Rank
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step import Stepper
from tiny_models import tiny_model

model = tiny_model()
assert not has_fused_pass(model.model)
stepper = Stepper(model, TrainingConfig(budget=Amount(1), batch=2), Rank(0, 1, torch.device("cpu")), torch.float32)
tokens = np.zeros((2, 4), np.int64)
print(stepper.step(tokens, tokens, 8, 1e-3).loss.isfinite().item())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(CASES.parents[1]), *filter(None, sys.path)])
    given = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True)


def names_of_checks() -> list[str]:
    """One test each, so that they can be run apart: on a device most of their time is compiling."""
    try:
        from fused_cases import CHECKS
    except ImportError:
        return ["without Triton there is none"]
    return [check.__name__ for check in CHECKS]


@pytest.mark.slow
def test_kernels_equal_the_references_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    done = run(str(CASES), TRITON_INTERPRET="1")
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_training_works_without_triton() -> None:
    done = run("-c", WITHOUT_TRITON)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check", names_of_checks())
def test_kernels_equal_the_references_on_the_device(check: str, dtype: torch.dtype) -> None:
    from fused_cases import CHECKS, check_all

    check_all("cuda", dtype, [one for one in CHECKS if one.__name__ == check])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_losses_of_a_larger_model_on_the_device(positions: str) -> None:
    from fused_cases import check_losses

    check_losses(positions)
