"""A step that asks a cluster for several GPUs is trained by so many processes."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from braidlm.core.jobs import Jobs
from braidlm.core.models.runs import newest_checkpoint
from braidlm.studies import running
from braidlm.studies.decoding import decode_study
from tests.studies.toy_study import DENSE, toy_study
from tests.warm_python import warm_python


class Node(Jobs):
    """A node of a cluster, in this process."""

    is_remote = True


def test_processes_save_where_the_job_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"dense": DENSE["dense"] | {"gpus": 2, "train": {"budget": "100000 steps"}}}
    study = decode_study(toy_study(tmp_path / "toy", tmp_path, steps=steps, seeds=[1]))
    run, until = tmp_path / "toy" / "seed-1" / "dense", time.monotonic() + 120

    def sleep(seconds: float) -> None:
        log = run / "metrics.jsonl"
        if time.monotonic() > until or (log.exists() and log.read_text().count("\n") > 4):
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(running, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("sys.executable", warm_python())
    with pytest.raises(KeyboardInterrupt):
        running.run_study(study, "cpu", jobs=Node())
    saved = newest_checkpoint(run)
    assert saved is not None
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert trained[-1]["tokens"] == trained[-1]["step"] * 2 * 8 * 32, "two processes, each with a batch"
    assert saved.name == f"step-{trained[-1]['step']:06d}"
