"""Scripts in processes in which braidlm cannot be imported."""

import os
import subprocess
from pathlib import Path

from tests.warm_python import warm_python

WITHOUT_BRAID = """
import sys

class NoBraid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "braidlm":
            raise ImportError("braidlm is not installed here")

sys.meta_path.insert(0, NoBraid())
try:
    import braidlm
except ImportError:
    pass
else:
    raise SystemExit("braidlm can be imported: this test would prove nothing")
"""
"""The beginning of a script for a process of its own."""


def run_without_braid(script: str, *arguments: Path | str) -> str:
    """What a script prints, which finds `sys` and its arguments there; an error fails the test."""
    environment = os.environ | {"HF_MODULES_CACHE": f"{os.environ['HF_MODULES_CACHE']}-without-braid"}
    command = [warm_python(), "-I", "-c", WITHOUT_BRAID + script, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
