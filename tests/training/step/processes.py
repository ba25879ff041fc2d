"""Training steps in one process and in several: what every process runs, and what is compared with one alone."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.training.preloaded"])
ROWS, LENGTH, STEPS = 16, 10, 6


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: dict[str, Any] = field(default_factory=dict)
    """What of the tiny model's architecture is replaced."""
    training: dict[str, Any] = field(default_factory=dict)
    parallel: Any = "sharded"
    decoder: Path | None = None


def batches(vocabulary: int) -> list[np.ndarray]:
    """The tokens of each step [rows, time + 1]."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocabulary, (ROWS, LENGTH + 1)) for _ in range(STEPS)]


def trained(case: Case, rank: Any, micro_batches: int) -> tuple[dict[str, Tensor], Any]:
    """Losses, norms and weights after all steps of a case, whose batch has so many micro-batches in all processes."""
    from braidlm.model.config.strict import decode
    from braidlm.training.recipe import TrainingConfig
    from braidlm.training.step.parallel import sum_over_processes
    from braidlm.training.step.spread import whole_parameters
    from braidlm.training.step.step import Stepper

    torch.manual_seed(3)
    subject, vocabulary = made(case)
    accumulation = micro_batches // rank.world_size
    own = {"batch": ROWS // micro_batches, "accumulation": accumulation, "optimizer": {"lr": 0.02}}
    parallel = {"parallel": case.parallel} if rank.world_size > 1 else {}
    config = decode(TrainingConfig, {"budget": STEPS, **own, **parallel, **case.training})
    stepper = Stepper(subject, config, rank, torch.float32)
    share = ROWS // rank.world_size
    mine = slice(rank.index * share, (rank.index + 1) * share)
    seen = []
    for step, tokens in enumerate(batches(vocabulary)):
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        labels[0, : step % 5] = -100
        count = int((labels != -100).sum())
        stepper.begin_step(step, step / STEPS)
        report = stepper.step(inputs[mine], labels[mine], count, 0.02 / (1 + step / 10), (step + 1) / STEPS)
        loss = sum_over_processes(report.loss.clone(), rank)
        seen.append(torch.stack((loss, report.gradient_norm)))
    found = {"losses": torch.stack(seen)}
    with whole_parameters(subject.model, keep=True):
        found |= {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    return found, stepper


def made(case: Case) -> tuple[Any, int]:
    """What a case trains, and its vocabulary."""
    from braidlm.training.decoder import TrainableDecoder
    from braidlm.training.start_from import train_gates_alone
    from braidlm.training.trainable import TrainableBraid
    from tests.tiny_models import VOCABULARY, tiny_model

    if case.decoder is None:
        return TrainableBraid(tiny_model(seed=5, **case.model)), VOCABULARY
    from braidlm.opening.decoder import decoder_by_name

    source = decoder_by_name(str(case.decoder))
    model = source.load("cpu", torch.float32)
    train_gates_alone(model)
    return TrainableDecoder(model, source), 320


def run_all(cases: dict[str, Case], world: int, out: Path, micro_batches: int) -> None:
    """Train every case in so many processes, one after the other; the first process writes what came out."""
    launch(world, train_cases, cases, out, micro_batches)


def train_cases(rank: Any, cases: dict[str, Case], out: Path, micro_batches: int) -> None:
    for name, case in cases.items():
        found, _ = trained(case, rank, micro_batches)
        if rank.is_main:
            save_file(found, out / f"{name}-{rank.world_size}.safetensors")


def launch(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, ...)` in a group of processes; any that fails fails the test."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    started = [CONTEXT.Process(target=_start, args=(index, world, port, work, arguments)) for index in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in started] == [0] * world


def _start(index: int, world: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    from braidlm.core import console
    from braidlm.training.step.parallel import join_group

    os.environ.update(RANK=str(index), WORLD_SIZE=str(world), LOCAL_RANK=str(index))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    console.set_quiet(True)
    try:
        with join_group("cpu") as rank:
            work(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
