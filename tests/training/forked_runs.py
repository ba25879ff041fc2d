"""`braid ...` as processes of their own that have imported everything already: a command's own start takes seconds."""

import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.training.preloaded"])


@dataclass
class ForkedRun:
    """One command in one or more processes, and the file that has what they print."""

    processes: list[BaseProcess]
    screen: Path

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def send(self, kind: signal.Signals) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, kind)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def wait(self) -> str:
        """Wait until all have exited; returns what they printed."""
        for process in self.processes:
            process.join(200)
        return self.screen.read_text()

    def finish(self, code: int = 0) -> str:
        """The same for processes that should all exit with this code."""
        printed = self.wait()
        assert self.exit_codes == [code] * len(self.processes), printed
        return printed


def fork(screen: Path, *arguments: str | Path, processes: int = 1) -> ForkedRun:
    """Start a command; more `processes` than one form a group, as those that torchrun starts."""
    group: dict[str, str] = {}
    if processes > 1:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    ranks = [group | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if group else {}) for rank in range(processes)]
    words = [str(word) for word in arguments]
    started = [CONTEXT.Process(target=_command, args=(screen, words, rank)) for rank in ranks]
    screen.write_text("")
    for process in started:
        process.start()
    return ForkedRun(list(started), screen)


def fork_torchrun(screen: Path, *arguments: str | Path) -> ForkedRun:
    """Start a command as two processes by the launcher that torchrun is, with its agent, rendezvous and environment."""
    launcher = CONTEXT.Process(target=_torchrun, args=(screen, [str(word) for word in arguments]))
    screen.write_text("")
    launcher.start()
    return ForkedRun([launcher], screen)


def _torchrun(screen: Path, words: list[str]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "a test"}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", **where)
    elastic_launch(config, _command)(screen, words, {})


def _command(screen: Path, words: list[str], rank: dict[str, str]) -> None:
    import torch

    from braidlm.cli.main import main

    os.environ.update(rank)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = screen.open("a", buffering=1)
    sys.exit(main(words))
