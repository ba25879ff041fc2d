"""Attention for routed queries against torch's own operations: in Triton's interpreter here, on the device if any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).parent / "routed_attention_cases.py"


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with CUDA builds of torch)")
    paths = os.pathsep.join([str(CASES.parents[1]), *filter(None, sys.path)])
    given = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_equal_the_reference_on_the_device() -> None:
    from routed_attention_cases import check_everything

    check_everything("cuda", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_equal_the_reference_at_real_size() -> None:
    from routed_attention_cases import check_real_size

    check_real_size(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replayed_graph_reads_a_new_seed() -> None:
    from routed_attention_cases import check_replay

    check_replay()
