"""Clipped AdamW in one pass is torch's AdamW after torch's clipping."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASE = Path(__file__).parent / "adamw_case.py"


def test_it_equals_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, str(CASE)], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_equals_torch_on_the_device() -> None:
    from adamw_case import check

    check("cuda")
