"""Hostile programs: each is contained, under namespaces and under Landlock alone, and leaves nothing behind.

They run as an ordinary user, as whom a program shares its user with all that it must not touch: where the tests are run
by root, by a process that has become another user. One such process runs all programs of an isolation.
"""

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from braidlm.evals.sandbox import kernel
from braidlm.evals.sandbox import sandbox as sandbox_module
from tests.evals.sandbox.hostile_programs import ATTEMPTS, FLOODS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in kernel.SUPPORTED, reason="the sandbox is for Linux"
)
NOBODY = 65534
ISOLATIONS = ("namespaces", "landlock")


@functools.cache
def outcomes(isolation: str) -> dict[str, Any]:
    """What came of all programs, and the state of what is outside afterwards."""
    as_root = os.geteuid() == 0
    python = os.path.realpath("/usr/bin/python3" if as_root else sys.executable)
    with (
        tempfile.TemporaryDirectory(prefix="braid-hostile-", dir="/tmp") as folder,
        tempfile.TemporaryDirectory(prefix="braid-code-", dir="/tmp") as code,
    ):
        os.chmod(folder, 0o777)
        os.chmod(code, 0o755)  # the checkout itself may lie in a home that nobody else can read
        package, tests = Path(code, "source/braidlm"), Path(code, "tests")
        unread = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(sandbox_module.__file__).parents[2], package, ignore=unread)
        shutil.copytree(Path(__file__).parent, tests, ignore=unread)
        job = {"isolation": isolation, "folder": folder, "source": str(package.parent), "tests": str(tests)}
        done = subprocess.run(
            [python, "-I", "-S", "-B", str(tests / "hostile_runner.py")],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd="/",
            **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_root else {}),
        )
        if done.returncode:
            return {"problem": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
        return json.loads(done.stdout)


def outcome(isolation: str, name: str) -> tuple[str, str]:
    """Why a program failed, and what it printed."""
    found = outcomes(isolation)
    if "skip" in found:
        pytest.skip(f"no {isolation} here: {found['skip']}")
    assert "problem" not in found, found["problem"]
    reason, printed = found["programs"][name]
    return reason, printed


def test_there_are_many() -> None:
    assert len(ATTEMPTS | FLOODS) == len(ATTEMPTS) + len(FLOODS) > 100


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempts(isolation: str, name: str) -> None:
    assert outcome(isolation, name) == ("", "refused")


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("name", FLOODS)
def test_floods(isolation: str, name: str) -> None:
    reason, _ = outcome(isolation, name)
    expected = FLOODS[name][2]
    assert any(text in reason for text in expected.split("|")) if expected else reason == ""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_is_changed_and_nothing_is_left(isolation: str) -> None:
    outcome(isolation, "read")
    found = outcomes(isolation)
    assert found["after"] == found["before"]
    assert found["left"] == {"files": [], "processes": [], "shared memory": []}
