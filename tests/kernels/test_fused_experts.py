"""The kernels for expert banks against torch's own operations: in Triton's interpreter here, on a device elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).parent / "fused_expert_cases.py"

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.slow
def test_kernels_for_experts_equal_the_references_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    paths = os.pathsep.join([str(CASES.parents[1]), *filter(None, sys.path)])
    given = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_for_experts_equal_the_references_on_the_device(dtype: torch.dtype) -> None:
    from fused_expert_cases import check_small

    check_small("cuda", dtype)


@pytest.mark.gpu
@needs_device
def test_kernels_for_experts_at_real_sizes() -> None:
    from fused_expert_cases import check_large

    check_large()


@pytest.mark.gpu
@needs_device
def test_a_pass_through_experts_replays_as_a_graph() -> None:
    from fused_expert_cases import check_replay

    check_replay()
