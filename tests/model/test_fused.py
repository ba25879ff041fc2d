"""The fused kernels against torch's own operations: in Triton's interpreter here, on the device where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).parent / "fused_cases.py"


@pytest.mark.slow
def test_kernels_equal_the_references_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    paths = os.pathsep.join([str(CASES.parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_references_on_the_device(dtype: torch.dtype) -> None:
    from fused_cases import check_everything

    check_everything("cuda", dtype)
