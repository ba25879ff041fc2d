"""torchrun with two processes equals one process with twice the batch, and goes on after a stop."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from braidlm.core.errors import BraidError
from braidlm.training.step.parallel import Rank, Watch, is_main_process, join_group, sum_over_processes
from braidlm.training.train import train
from tests.training.forked_runs import fork, fork_torchrun
from tests.training.tiny_runs import records, tiny_recipe, weights, written


def recipe(stories: Path, out: Path, batch: int) -> dict[str, Any]:
    training = {"budget": "1500 words", "batch": batch, "accumulation": 2}
    return tiny_recipe({"stories": stories}, out, training=training, checkpoints={"every": "400 words"})


@pytest.fixture(scope="module")
def alone(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with the whole batch."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(recipe(stories, folder, 4))
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    ours, theirs = (weights(run / "checkpoints" / "chck_1500") for run in (folder, alone))
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)
    for a, b in zip(records(folder, "train"), records(alone, "train"), strict=True):
        assert a == {k: pytest.approx(v, abs=1e-4) for k, v in b.items()} | {k: b[k] for k in ("kind", "epochs")}


@pytest.mark.slow
def test_two_processes_equal_twice_the_batch(stories: Path, alone: Path, tmp_path: Path) -> None:
    file = written(recipe(stories, tmp_path / "run", 4), tmp_path)
    printed = fork_torchrun(tmp_path / "screen", "train", file, "training.batch=2", "--device", "cpu").finish()
    assert_same(tmp_path / "run", alone)
    assert printed.count("checkpoints/chck_1500") == 1, "only the main process speaks"
    assert "distributed is disabled" not in printed


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on(stories: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", written(recipe(stories, folder, 2), tmp_path), "--device", "cpu")
    run = fork(tmp_path / "screen", *command, processes=2)
    while not (folder / "states" / "chck_400").is_dir() and run.is_alive():
        time.sleep(0.001)
    run.terminate()
    if "Stopped" in run.wait():  # or the processes were through before
        assert run.exit_codes == [143, 143]
        assert run.screen.read_text().count("Stopped and saved as chck_") == 1
        fork(tmp_path / "screen", *command, processes=2).finish()
    assert_same(folder, alone)


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_nothing_is_lost(stories: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", written(recipe(stories, folder, 2), tmp_path), "training.parallel=sharded", "--device", "cpu")
    run = fork(tmp_path / "screen", *command, processes=2)
    while not (folder / "states" / "chck_400").is_dir() and run.is_alive():
        time.sleep(0.001)
    run.processes[1].kill()
    since = time.monotonic()
    printed = run.wait()
    assert time.monotonic() - since < 60
    assert run.exit_codes[0] == 2
    assert "another process of this run has ended or does not answer" in printed
    assert "The same command goes on from the newest checkpoint." in printed
    assert "Traceback" not in printed
    fork(tmp_path / "screen", *command, processes=2).finish()
    assert_same(folder, alone)


def test_a_process_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store.set("process 1", "1")  # and it never counts on
    watch = Watch(Rank(0, 2, torch.device("cpu")), every=0.01, patience=0.1)
    assert ended.wait(20)
    watch.end()
    assert "does not answer, so that this one ends too (process 1)" in capfd.readouterr().err


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_group("cpu") as rank:
        assert rank == Rank(0, 1, torch.device("cpu"))
        assert rank.is_main
        assert sum_over_processes(torch.tensor(3.0), rank) == 3.0
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()


@pytest.mark.parametrize("name", ["cuda:7", "nothing"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(BraidError) as caught:
        join_group(name).__enter__()
    assert f"there is no device '{name}' here" in str(caught.value)
    assert "privateuseone" not in str(caught.value), "torch's list of every device is no help"
    assert "Use auto" in str(caught.value)
