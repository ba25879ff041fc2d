"""Tests of a Python program, run in another process than the program: see `remote_calls.py`."""

from pathlib import Path

from braidlm.evals.sandbox import remote_calls
from braidlm.evals.sandbox.sandbox import Harness, Limits, Program, Step

_REMOTE_CALLS = Path(remote_calls.__file__).read_text(encoding="utf-8")


def python_program(python: str, program: str, given: str, names: tuple[str, ...], tests: str, proof: str) -> Program:
    """A program with its tests: these alone have the proof, which is printed at their end."""
    command = [python, "-I", "-S", "-"]
    run = f"RemoteTests().run({program!r}, {given!r}, {names!r}, {tests!r}, {proof!r})"
    harness = Harness(command, f"{_REMOTE_CALLS}\n{run}\n")
    return Program({}, [Step(command, Limits(), input=f"{_REMOTE_CALLS}\nServedProgram().serve()\n", harness=harness)])
