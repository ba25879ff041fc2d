"""The values of kernels fit into the registers of a GPU, however many experts there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
    pytest.skip("this Triton does not compile for NVIDIA's GPUs", allow_module_level=True)

A_FEW_VALUES = 96
"""Bytes of stack that cost nothing to speak of: some versions of Triton need as many for 64 choices, others none."""


def test_kernels_of_many_experts_need_no_memory_for_their_values() -> None:
    """Sums over choices once needed 128 bytes with 16 experts, and 4,288 with 24."""
    program = Path(__file__).with_name("stack_of.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stacks = json.loads(done.stdout)
    assert len(stacks) == 18
    assert max(stacks.values()) <= A_FEW_VALUES, stacks
