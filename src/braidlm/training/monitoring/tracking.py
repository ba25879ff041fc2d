"""Metrics: metrics.jsonl always, TensorBoard and Weights & Biases on request.

history.jsonl, beside it, says when and on what a run was started, each time, and which errors ended it: the metrics of
a run that was stopped and went on are those of one that never was.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from braidlm.core.console import warn
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, write_text
from braidlm.core.models.runs import HISTORY, METRICS
from braidlm.core.reading import explained_system_errors, parse_row
from braidlm.training.recipe import LogConfig


class Tracker:
    """Writes records of a run; `kind` is train, validation or sample."""

    def __init__(self, folder: Path, config: LogConfig, name: str, resumed_step: int, expected: int | None = None):
        """`expected` records were written up to the step that the run resumes from, if the checkpoint says so."""
        self.path = folder / METRICS
        with explained_system_errors(self.path):
            self.records = drop_records_after(self.path, resumed_step)
            self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())
        if expected is not None and self.records < expected:
            warn(
                f"{self.path}: {expected - self.records} of {expected} records up to step {resumed_step:,} are lost, "
                "so the curves have gaps; the training is the same. If you have a copy, stop now, put it back and "
                "run the same command again."
            )
        self.sinks: list[TensorBoardSink | WandbSink] = []
        if "tensorboard" in config.track:
            self.sinks.append(TensorBoardSink(folder / "tensorboard", resumed_step))
        if "wandb" in config.track:
            self.sinks.append(WandbSink(folder, config.project, name))
        self.since = time.perf_counter()

    def record(self, kind: str, step: int, **facts: Any) -> None:
        """One line of metrics.jsonl; numbers also go to the other sinks. `seconds` add up to the run's wall clock."""
        now = time.perf_counter()
        facts["seconds"], self.since = round(now - self.since, 3), now
        with explained_disk_errors(self.path):
            self.file.write(json.dumps({"kind": kind, "step": step, **facts}, ensure_ascii=False) + "\n")
            self.file.flush()
        self.records += 1
        numbers = dict(_numbers(kind, facts))
        for sink in self.sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the record was written
            self.file.close()
        for sink in self.sinks:
            sink.close()


def drop_records_after(path: Path, step: int) -> int:
    """Remove records after the step that a run resumes from, and lines that are none; returns how many are left."""
    if not path.is_file():
        return 0
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(BraidError, KeyError, TypeError):
            kept += [line] if parse_row(line)["step"] <= step else []
    write_text(path, "".join(kept))
    return len(kept)


class TensorBoardSink:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int):
        module = _import("torch.utils.tensorboard", "TensorBoard")
        self.writer = module.SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A Weights & Biases run that is resumed with the training run; offline with WANDB_MODE=offline."""

    def __init__(self, folder: Path, project: str, name: str):
        wandb = _import("wandb", "Weights & Biases")
        own = folder / "wandb-id"
        if not own.is_file():
            own.write_text(secrets.token_hex(4))
        try:
            self.run = wandb.init(project=project, name=name, dir=str(folder), id=own.read_text(), resume="allow")
        except wandb.errors.Error as error:
            advice = "Log in with `wandb login`, or set WANDB_MODE=offline."
            raise BraidError(f"Weights & Biases cannot be used: {error}", todo=advice) from error

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


def _import(module: str, title: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise BraidError(f"{title} is not installed", todo="pip install 'braidlm[track]'") from error


def _numbers(prefix: str, facts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


def record_event(run: Path, kind: str, **facts: Any) -> None:
    """One line more in history.jsonl, with the time."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    with explained_disk_errors(run / HISTORY), open(run / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "time": time, **facts}, ensure_ascii=False) + "\n")
