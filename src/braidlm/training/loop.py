"""The training loop: batches in, metrics, samples and checkpoints out."""

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.decoding.generation import encode_prompts
from braidlm.core.devices import PeakMemory, explained_out_of_memory
from braidlm.core.errors import INTERRUPTIONS, BraidError, Terminated
from braidlm.core.models.folders import load_lineage
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import OpenData
from braidlm.training.amounts import Pace, Progress, never_read, repetition
from braidlm.training.features.feature import Part, Setup, make_features
from braidlm.training.monitoring.reporter import Reporter
from braidlm.training.monitoring.tracking import Tracker
from braidlm.training.recipe import Recipe
from braidlm.training.run_folder import budget_of, earlier_budgets
from braidlm.training.saving.checkpoints import Checkpoints, checkpoint_name
from braidlm.training.saving.state import StepState, explained_state_errors
from braidlm.training.schedules import LearningRate
from braidlm.training.step.compute import (
    Choices,
    choose_compute,
    choose_cpu_dtype,
    choose_dtype,
    choose_threads,
    saved_threads,
    use_compute,
    using_threads,
)
from braidlm.training.step.optimizers.contract import decay_outlasts_rate
from braidlm.training.step.parallel import Rank, broadcast, sum_over_processes, wait_for_all
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import Trainable, trainable_parameters

PATIENCE = 1.0
"""Seconds. A second signal within them is torchrun forwarding the same Ctrl-C."""


class StopSignal:
    """Ctrl-C or SIGTERM lets the step finish and the run be saved; a second one interrupts at once."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.requested_at: float | None = None
        self.interruption: type[KeyboardInterrupt] = Terminated  # or, of a process that got a signal, the first one's

    def __enter__(self) -> None:
        try:
            self.previous = {number: signal.signal(number, self._handle) for number in INTERRUPTIONS}
        except ValueError:  # not in the main thread: signals stay as they are
            self.previous = {}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether any process received a signal; the same answer on all, so that they stop after the same step."""
        here = self.requested_at is not None
        if self.rank.world_size == 1:  # without waiting for the device
            return here
        return bool(sum_over_processes(torch.tensor(float(here), device=self.rank.device), self.rank))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested_at is None:
            self.requested_at, self.interruption = now, INTERRUPTIONS[number]
        elif now - self.requested_at > PATIENCE:
            raise INTERRUPTIONS[number]


class Trainer:
    """One run in memory."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Trainable,
        data: OpenData,
        lineage: dict[str, Any],
        rank: Rank,
        memory: PeakMemory,
    ):
        """`lineage` is what checkpoints say of the recipe and of its sources; `memory` is what records tell."""
        self.recipe, self.trained, self.data, self.rank = recipe, trained, data, rank
        self.model, training = trained.model, recipe.training
        self.checkpoints = Checkpoints(Path(recipe.folder), rank, recipe.checkpoints.keep)
        self.budget = training.budget
        dtype = choose_dtype(training.precision, rank.device)
        self.features = make_features(Setup(self.model, training, rank, dtype, recipe.seed, recipe.data, data))
        self.lineage = {**lineage, "sources": [*lineage["sources"], *(x for f in self.features for x in f.sources())]}
        length = recipe.data.length
        parts: Sequence[Part] = [(1.0, length)]
        for one in self.features:
            length, parts = one.text_length(length), one.attended(parts)
        # Of a model whose weights lie on several processes nobody can tell what it costs.
        self.costs = {"parameters": sum(parameter.numel() for parameter in self.model.parameters())}
        self.costs |= {"flops_per_token": trained.flops_per_token(recipe.data.length)}
        self.trainable_parameters = trainable_parameters(self.model)
        mean = sum(share * trained.flops_per_token(attended) for share, attended in parts)
        self.stepper = Stepper(trained, training, rank, dtype, self.features)
        self.state = StepState(trained, self.stepper.optimizer, self.features)
        rows = {"rows": training.batch, "accumulation": training.accumulation}
        own = {"seed": recipe.seed, "rank": rank.index, "world": rank.world_size}
        chunking = chunkings.build(recipe.data.chunking)
        self.loader = Loader(data.train, chunking, length, mix=recipe.data.mix, **rows, **own)
        for one in self.features:
            one.read_loader(self.loader)
        self.learning_rate = LearningRate(training)
        self.progress = Progress()
        self.rate = 0.0
        flops = round(mean * recipe.data.length / length)  # tokens that are no text cost too
        self.reporter = Reporter(recipe, trained, data, self.stepper, flops, memory)
        self.saved_at: int | None = None
        self.recorded: int | None = None  # records up to the checkpoint that the run resumes from, if it says so
        self.earlier_budgets: list[dict[str, Any]] = []  # smaller ones, each with the step that it was used up to
        self.compute: Choices | None = None
        self.threads: int | None = None
        self.saved_dtype: str | None = None
        self.stop = StopSignal(rank)
        self._check()

    def _check(self) -> None:
        """Find problems that would show only later in the run."""
        if self.recipe.samples.prompts:
            encode_prompts(self.data.tokenizer, self.recipe.samples.prompts)
            if self.stepper.layout is not None and self.stepper.layout.experts > 1:
                what = "samples.prompts: processes that share experts may draw other tokens, and wait for each other"
                raise BraidError(what, todo="Leave it out, or let every process have all experts.")
        if not self.rank.is_main:
            return
        training, length = self.recipe.training, self.loader.length
        warnings = [
            *(warning for one in self.features for warning in one.warnings()),
            decay_outlasts_rate(training.optimizer.options, training.schedule),
            *(self.loader.chunking.warning(stream, length) for stream in self.loader.streams),
            never_read(self.budget, self.loader),
        ]
        for warning in filter(None, warnings):
            console.warn(warning)
        if repeated := repetition(self.budget, self.loader):
            console.say(repeated)

    @property
    def finished(self) -> bool:
        return self.progress.done(self.budget.unit) >= self.budget.count

    def resume(self) -> str | None:
        """Resume from the newest good checkpoint; returns its name, or None where there is none."""
        if self.rank.is_main:
            self.checkpoints.remove_leftovers()
        wait_for_all(self.rank)
        name = broadcast(self.checkpoints.newest_good() if self.rank.is_main else None, self.rank)
        if name is None:
            self.checkpoints.check_empty()
        else:
            self._restore(name)
        wait_for_all(self.rank)
        if self.rank.is_main:
            self.checkpoints.forget_after(name)
        return name

    def _restore(self, name: str) -> None:
        """Go on exactly where a checkpoint was saved."""
        for one in self.features:
            one.check_checkpoint(self.checkpoints.models / name)
        with explained_state_errors(self.checkpoints.states / name):
            position = self.checkpoints.restore(name, self.state)
            self.progress = Progress(**position["progress"])
            self.loader.load_state(position["loader"])
            self.reporter.last, self.reporter.metrics.losses = position["last"], position["losses"]
            self.compute = position.get("compute")
            self.threads, self.saved_dtype = saved_threads(position), position.get("dtype", "float32")
            records = position.get("records")
            self.recorded = records if isinstance(records, int) else None
        grew = False
        with contextlib.suppress(BraidError):  # the weights are good, whatever happened to the lineage
            lineage = load_lineage(self.checkpoints.models / name) or {}
            self.earlier_budgets = earlier_budgets(lineage, self.recipe.training, self.progress)
            grew = budget_of(lineage.get("recipe")) not in (None, self.budget)
        for one in self.features if grew else ():
            one.budget_grew()
        self.saved_at = self.progress.steps

    def run(self, tracker: Tracker | None) -> bool:
        """Train to the budget; False if a signal stopped it before. `tracker` is None on all but the main process."""
        training, shape = self.recipe.training, (self.recipe.training.batch, self.recipe.data.length)
        todo = (
            "training.activation_checkpointing=true needs less, and the run goes on. So does a smaller training.batch "
            "with more training.accumulation, in another run."
        )
        with explained_out_of_memory(f"for a step of {shape[0]} x {shape[1]} tokens", todo):
            self.threads = choose_threads(self.trained, shape, self.rank, training.threads, self.threads)
            with using_threads(self.threads):
                dtype = choose_cpu_dtype(self.trained, shape, self.rank, training.precision, self.saved_dtype)
                self.stepper.dtype = dtype or self.stepper.dtype
                self._choose_compute(shape)
                finished = self._train(tracker)
                self.checkpoints.wait()
                return finished

    def _train(self, tracker: Tracker | None) -> bool:
        total, done = float(self.budget.count), float(self.progress.done(self.budget.unit))
        with console.progress(self.recipe.name, total, self.budget.unit, done) as advance, self.stop:
            self.reporter.speed.start(self.progress.tokens)
            while not self.finished:
                before = self.progress
                self._step()
                self._after_step(before, tracker, advance if self.rank.is_main else None)
                # Processes must agree, which synchronises: on several GPUs only where a record does so anyway.
                several_gpus = self.rank.world_size > 1 and self.rank.device.type == "cuda"
                may_ask = not several_gpus or self.progress.steps % self.recipe.log.every == 0
                if not self.finished and may_ask and self.stop.requested():
                    self._save(tracker, interrupted=True)
                    return False
        return True

    def _choose_compute(self, shape: tuple[int, int]) -> None:
        """Fix how the model is computed before the first step, and say it; a resumed run keeps what was chosen."""
        lowered = self.stepper.lowered
        if self.stepper.layout is not None and self.rank.device.type == "cuda":
            console.say(
                "No kernels serve whole layers: they read the whole weights of one process, and here a layer's are "
                "gathered while it computes. Heads and gates have theirs."
            )
        elif lowered is not None:
            console.say(f"On this GPU {lowered.lowered.summary()}.")
        elif self.stepper.extra and self.rank.device.type == "cuda":
            console.say(f"The losses {', '.join(self.stepper.extra)} read the plain pass: no kernels serve this step.")
        if self.compute is None:
            parts = set() if lowered is None else lowered.lowered.parts
            self.compute = choose_compute(self.model, parts, shape, self.rank, self.stepper.dtype)
        use_compute(self.model, self.compute)

    def _step(self) -> None:
        before, share = self.progress, self.progress.share(self.budget)
        self.stepper.begin_step(before.steps, share)
        row_length = next(filter(None, (one.row_length(share) for one in self.features)), None)
        batch = self.loader.next_batch(share, self._left("words"), self._left("tokens"), row_length)
        self.progress = before.after(batch)
        self.rate, share = self.learning_rate(before, self.progress), self.progress.share(self.budget)
        batch = self.stepper.read_batch(batch, share)
        report = self.stepper.step(batch.inputs, batch.labels, batch.target_count, self.rate, share)
        self.reporter.metrics.unread.append((self.progress.steps, report))
        if self.rank.device.type == "cpu":
            self._check_finite()

    def _left(self, unit: str) -> int | None:
        """How many words or tokens the next batch may have, so that every mark in that unit is met exactly."""
        done, pace = self.progress.done(unit), self.recipe.checkpoints.every
        marks = [self.budget.count if self.budget.unit == unit else None]
        marks += [pace.next_after(done) if pace.unit == unit else None]
        return min((mark - done for mark in marks if mark is not None), default=None)

    def _after_step(self, before: Progress, tracker: Tracker | None, advance: Callable | None) -> None:
        now = self.progress
        if self.finished or now.steps % self.recipe.log.every == 0:
            self._check_finite()
            record = self.reporter.record_losses(now, self.rate, self.loader.epochs, tracker)
            if advance is not None:
                used = f"  MFU {record['utilisation']:.0%}" if "utilisation" in record else ""
                rate = console.count(float(record["tokens_per_second"]))
                advance(now.done(self.budget.unit), f"loss {record['loss']:.3f}  {rate} tokens/s{used}")
        validating = self.finished or self._due(self.recipe.validation.every, before)
        if validating and self.reporter.held_out:
            self.reporter.validate(now, self.finished, tracker)
        if self._due(self.recipe.samples.every, before) or (self.recipe.samples.every is None and validating):
            self.reporter.sample(now, tracker)
        if self.finished or self._due(self.recipe.checkpoints.every, before):
            self._save(tracker)

    def _due(self, pace: Pace | None, before: Progress) -> bool:
        """Whether a mark of the pace was reached in the last step."""
        if pace is None:
            return False
        mark = pace.next_after(before.done(pace.unit))
        return mark is not None and self.progress.done(pace.unit) >= mark

    def _check_finite(self) -> None:
        if problem := self.reporter.metrics.read():
            good, last = self.checkpoints.newest_good(), "No checkpoint was saved yet."
            if good is not None:
                last = f"The last good checkpoint is {self.checkpoints.models / good} (a run may start_from it)."
            todo = (
                f"{last} Try a lower training.optimizer.lr (now {self.recipe.training.optimizer.options.lr:g}), "
                "a longer training.warmup, or training.clip=1.0."
            )
            raise BraidError(problem, self.recipe.folder, todo)

    def _save(self, tracker: Tracker | None, interrupted: bool = False) -> None:
        """Save a checkpoint, unless this step has one; an interruption's is removed when the next is saved."""
        if self.saved_at == self.progress.steps:
            return
        self._check_finite()  # a checkpoint must be a good one
        position = {
            "progress": asdict(self.progress),
            "loader": self.loader.state(),
            "last": self.reporter.last,
            "losses": self.reporter.metrics.losses,
            "compute": self.compute,
            "threads": self.threads,
            "dtype": "bf16" if self.stepper.dtype is torch.bfloat16 else "float32",
            "records": None if tracker is None else tracker.records,
            "trainable": self.trainable_parameters,
        }
        facts = {**asdict(self.progress), **self.reporter.last, **self.reporter.weights_facts()}
        facts |= {key: value for one in self.features for key, value in one.told().items()}
        facts = {key: value for key, value in facts.items() if value is not None}
        facts |= {"earlier_budgets": self.earlier_budgets} if self.earlier_budgets else {}
        facts |= {"interrupted": True} if interrupted else {}
        name = checkpoint_name(self.recipe.checkpoints.every, self.progress)
        with self.reporter.speed.paused():
            self.checkpoints.save(name, self.state, position, self.data.tokenizer, {**self.lineage, "training": facts})
        self.saved_at = self.progress.steps
