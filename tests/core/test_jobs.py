"""Jobs here and on a Ray cluster: their order, their errors, and nodes that are lost or do not fit."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braidlm.core import jobs as jobs_module
from braidlm.core.errors import BraidError
from braidlm.core.jobs import Jobs, Place, open_jobs
from braidlm.data.packing.prepare import prepare
from braidlm.studies.decoding import TrainedModel, decode_study
from braidlm.studies.running import run_study
from tests.core.small_jobs import add, write_on_full_disk
from tests.studies.toy_study import COMPOSED, DENSE, path, toy_study


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs no jobs, and a node with one core."""
    pytest.importorskip("ray", reason="needs the extra `cluster`: pip install 'braidlm[cluster]'")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture
def on(cluster: Any, tmp_path: Path) -> Callable[..., Any]:
    return lambda **options: open_jobs(f"ray:{cluster.address}", tmp_path, **{"device": "cpu", **options})


def test_a_job_here_runs_when_it_is_started() -> None:
    jobs = Jobs()
    assert jobs.results([jobs.start("sum", add, jobs.start("first", add, 1, 2), 4, gpus=8)]) == [7]


def test_jobs_of_which_one_fails(on: Callable[..., Any], tmp_path: Path) -> None:
    """A full disk says on which node, and stops only the jobs that read what failed."""
    done: dict[str, int] = {}
    with on() as jobs:
        first = [jobs.start(f"first {number}", add, number, 10) for number in range(3)]
        assert jobs.results([jobs.start("all", add, *first), 5, first[2]]) == [33, 5, 12]
        failed = jobs.start("full", write_on_full_disk)
        started = {"full": failed, "after": jobs.start("after", add, failed), "apart": jobs.start("apart", add, 1, 2)}
        with pytest.raises(BraidError) as caught:
            done.update(jobs.finished(started))
    assert done == {"apart": 3}
    expected = f"runs/mine: the disk is full; nothing was written (on node {socket.gethostname()})"
    assert str(caught.value).split("\n")[0] == expected
    assert not list(tmp_path.iterdir()), "nothing is left in the folder"


def test_other_versions_on_a_node(on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = jobs_module._versions()
    monkeypatch.setattr(jobs_module, "_versions", lambda: own | {"torch": "1.0", "braidlm": "9.9"})
    with pytest.raises(BraidError) as caught, on():
        pass
    what = f"it has braidlm {own['braidlm']} and not 9.9, torch {own['torch']} and not 1.0, as the machine that starts"
    assert caught.value.what.startswith(what)


def test_a_gpu_that_no_node_has(on: Callable[..., Any]) -> None:
    with pytest.raises(BraidError, match="--device cuda: this asks for 1 GPU, and no node has one"), on(device="cuda"):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no-such-host.invalid:6379", "127.0.0.1:port"])
def test_a_wrong_address(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `cluster`: pip install 'braidlm[cluster]'")
    with (
        pytest.raises(BraidError, match=f"no Ray cluster answers at '{address}'"),
        open_jobs(f"ray:{address}", tmp_path),
    ):
        pass
    with pytest.raises(BraidError, match="expected ray or ray:ADDRESS"), open_jobs("slurm", tmp_path):
        pass


def test_a_cluster_that_wants_a_token() -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(BraidError, match=r"Something listens there.*RAY_AUTH_MODE=token"),
    ):
        jobs_module._connect(SimpleNamespace(init=refuse), f"127.0.0.1:{listener.getsockname()[1]}")


def test_a_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    place = Place(str(tmp_path), str(tmp_path / "run" / ".jobs"), jobs_module._versions(), quiet=True)
    with pytest.raises(BraidError, match=f"node .*: it does not see {tmp_path / 'run'}\nEvery node needs the same"):
        place.check()
    replace(place, seen=str(tmp_path)).check()


def test_a_job_that_is_run_again_goes_on(tmp_path: Path) -> None:
    place = Place(os.getcwd(), str(tmp_path), jobs_module._versions(), quiet=True)
    assert place.run("a/b", dict, {"fresh": True}) == {"fresh": True}
    assert place.run("a/b", dict, {"fresh": True}) == {"fresh": False}


def test_a_data_set_is_packed_by_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """Documents that a shard repeats of another are left out as here."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"A text of file {number}.\n\nThe same text in every file.\n")
    reading = {"tokenizer": "bytes", "separator": "blank", "duplicates": "exact"}
    here = prepare(str(tmp_path / "*.txt"), tmp_path / "here", workers=1, **reading)
    there = prepare(str(tmp_path / "*.txt"), tmp_path / "there", cluster=f"ray:{cluster.address}", **reading)
    assert here.manifest.documents == there.manifest.documents == 4
    files = {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir() if file.name.startswith("tokens")}
    assert files == {name: (tmp_path / "there" / name).read_bytes() for name in files} != {}
    with pytest.raises(BraidError, match="--workers: a cluster decides how many processes pack"):
        prepare("stories", tmp_path / "other", cluster="ray", workers=2)


@pytest.mark.slow
def test_a_node_is_killed_in_the_middle_of_a_study(cluster: Any, on: Callable[..., Any], tmp_path: Path) -> None:
    """What is trained is, to the byte, what one machine trains."""
    # Long enough that the node is lost before its training ends.
    steps = {"stories": path("stories", budget="120 steps"), "maths": path("maths", budget="3 steps")}
    steps |= {"linear": COMPOSED["linear"]}

    def run(name: str, saved: int = 1000, **options: Any) -> list[TrainedModel]:
        rarely = {"validation": {"every": 1000, "tokens": 500}, "checkpoints": {"every": saved}}
        data = toy_study(tmp_path / name, tmp_path / "data", steps=steps, **rarely)
        data["training"]["threads"] = 1
        return run_study(decode_study(data), "cpu", **options)

    here = run("here")
    (doomed,) = cluster.worker_nodes
    with on() as jobs, ThreadPoolExecutor(1) as thread:
        asks = decode_study(toy_study(tmp_path, tmp_path, steps={"dense": DENSE["dense"] | {"gpus": 2}}))
        with pytest.raises(BraidError, match=r"steps\.dense\.gpus: this asks for 2 GPUs, and no node has one"):
            run_study(asks, "cpu", jobs=jobs)
        running = thread.submit(run, "cluster", saved=4, jobs=jobs)
        while not running.done() and not list((tmp_path / "cluster/seed-1/stories").glob("states/step-*")):
            time.sleep(0.05)
        cluster.remove_node(doomed, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        there = running.result()
    assert [model.name for model in there] == ["stories", "maths", "linear"]
    for one, other in zip(here, there, strict=True):
        for file in ("model.safetensors", "config.json", "tokenizer.json", "modeling_braid.py"):
            assert (one.model / file).read_bytes() == (other.model / file).read_bytes(), (one.name, file)
    history = (tmp_path / "cluster/seed-1/stories/history.jsonl").read_text().splitlines()
    starts = [event["step"] for event in map(json.loads, history) if event["kind"] == "start"]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1], "it went on from a checkpoint"
