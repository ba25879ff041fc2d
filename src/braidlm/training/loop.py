"""The training loop: batches in, metrics, samples and checkpoints out."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from braidlm.core import console
from braidlm.core.decoding.generation import encode_prompts
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.memory import explained_out_of_memory
from braidlm.data.loading.batches import make_pauses
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.open_data import OpenData
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Pace, never_read, repetition
from braidlm.training.averaging import WeightAverage, averages
from braidlm.training.distill.distillation import make_distillation
from braidlm.training.distill.teachers import Teacher
from braidlm.training.lengths import length_at, shares_of_lengths
from braidlm.training.monitoring.progress import Progress, progress_note
from braidlm.training.monitoring.reporter import Reporter
from braidlm.training.monitoring.tracking import Tracker
from braidlm.training.recipe import Recipe
from braidlm.training.run_folder import budget_of
from braidlm.training.saving.checkpoints import Checkpoints, checkpoint_name
from braidlm.training.saving.earlier_budgets import earlier_budgets
from braidlm.training.saving.state import StepState, explained_state_errors
from braidlm.training.schedules import dropout_schedules, schedules
from braidlm.training.step.compute import Choices, choose_compute, use_compute
from braidlm.training.step.extra_losses import ExtraLoss
from braidlm.training.step.learning_rate import LearningRate
from braidlm.training.step.optimizers.decay import decay_outlasts_rate
from braidlm.training.step.parallel import Rank
from braidlm.training.step.precision import choose_dtype
from braidlm.training.step.step import Stepper
from braidlm.training.step.threads import choose_threads, saved_threads, using_threads
from braidlm.training.stopping import StopSignal
from braidlm.training.trainables.trainable import Trainable

TEMPERATURE_LEVELS = 20
"""The number of levels of a temperature schedule; each change recompiles or recaptures the step."""


class Trainer:
    """One run in memory."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Trainable,
        data: OpenData,
        checkpoints: Checkpoints,
        lineage: Callable[[dict[str, Any]], dict[str, Any]],
        rank: Rank,
        teachers: Sequence[Teacher] = (),
    ):
        self.recipe, self.trained, self.data, self.rank = recipe, trained, data, rank
        self.model = trained.model
        self.checkpoints, self.lineage = checkpoints, lineage
        training = recipe.training
        self.budget = training.budget
        self.dtype = choose_dtype(training.precision, rank.device)
        given = self._distillation(teachers)
        self.stepper = Stepper(trained, training, rank, self.dtype, recipe.memory, given, recipe.seed)
        for loss in self.stepper.extra.values():
            loss.read_tokenizer(data.tokenizer)
        self.average: WeightAverage | None = None
        if training.average is not None:
            self.average = averages.build(training.average, self.model)
        extra = nn.ModuleDict(self.stepper.extra)
        self.state = StepState(trained, self.stepper.optimizer, self.stepper.memory, extra, self.average)
        pauses = make_pauses(recipe.data.pauses, recipe.data.length, data.tokenizer, recipe.seed)
        self.loader = Loader(
            data.train,
            chunkings.build(recipe.data.chunking),
            recipe.data.length - (pauses.count if pauses else 0),
            rows=training.batch,
            accumulation=training.accumulation,
            seed=recipe.seed,
            mix=recipe.data.mix,
            rank=rank.index,
            world=rank.world_size,
            pauses=pauses,
        )
        self.learning_rate = LearningRate(training)
        self.dropout_schedule = dropout_schedules.build(training.dropout)
        self.temperature_schedule = schedules.build(training.temperature)
        self.progress = Progress()
        self.rate = 0.0
        # A chunk's tokens see half of it on average, and all of the memory.
        lengths = shares_of_lengths(training.lengths, recipe.data.length)
        mean = sum(share * trained.flops_per_token(length + 2 * recipe.memory) for share, length in lengths)
        flops = round(mean * recipe.data.length / self.loader.length)  # pauses cost too
        self.reporter = Reporter(recipe, trained, data, rank, self.dtype, self.stepper.extra, self.average, flops)
        self.saved_at: int | None = None
        self.recorded: int | None = None
        """The number of records that were written up to the checkpoint that the run resumes from, if it says so."""
        self.earlier_budgets: list[dict[str, Any]] = []
        """Budgets that the run had before it was given a larger one, each with the step that it was used up to."""
        self.compute: Choices | None = None
        self.threads: int | None = None
        self.stop = StopSignal(rank)
        self._check()

    def _distillation(self, teachers: Sequence[Teacher]) -> dict[str, ExtraLoss]:
        """What teachers add to the loss."""
        training, data = self.recipe.training, self.recipe.data
        if training.distill is None:
            return {}
        assert isinstance(self.model, BraidForCausalLM)  # a recipe of a decoder has no teachers
        shape = (training.batch * training.accumulation, data.length)
        loss = make_distillation(
            training.distill, teachers, self.model, self.data, shape, data.cache, self.rank, self.dtype
        )
        return {"distill": loss}

    def _check(self) -> None:
        """Find problems that would show only later in the run."""
        if self.recipe.samples.prompts:
            encode_prompts(self.data.tokenizer, self.recipe.samples.prompts)
        if not self.rank.is_main:
            return
        training = self.recipe.training
        if training.dropout.kind != "constant" and not self.stepper.has_dropout:
            console.warn("training.dropout has no effect: every dropout rate of the model is 0")
        if training.temperature.kind != "constant" and not self.stepper.has_temperature:
            console.warn("training.temperature has no effect: no join of the model chooses by Gumbel noise")
        if outlasts := decay_outlasts_rate(training.optimizer.options, training.schedule):
            console.warn(outlasts)
        for stream in self.loader.streams:
            if remark := self.loader.chunking.warning(stream, self.loader.length):
                console.warn(remark)
        tokens_per_step = self.loader.global_rows * self.loader.length
        if repeated := repetition(self.budget, self.loader.streams, tokens_per_step):
            console.say(repeated)
        if unread := never_read(self.budget, self.loader.streams, tokens_per_step):
            console.warn(unread)

    @property
    def finished(self) -> bool:
        return self.progress.done(self.budget.unit) >= self.budget.count

    def restore(self, name: str) -> None:
        """Resume exactly where a checkpoint was saved."""
        with explained_state_errors(self.checkpoints.states / name):
            position = self.checkpoints.restore(name, self.state)
            self.progress = Progress(**position["progress"])
            self.loader.load_state(position["loader"])
            self.reporter.last, self.reporter.metrics.losses = position["last"], position["losses"]
            self.compute = position.get("compute")
            self.threads = saved_threads(position)
            records = position.get("records")
            self.recorded = records if isinstance(records, int) else None
        with contextlib.suppress(BraidError):  # the weights are good, whatever happened to the lineage
            lineage = load_lineage(self.checkpoints.models / name) or {}
            self.earlier_budgets = earlier_budgets(lineage, self.recipe.training, self.progress)
            if self.average is not None and budget_of(lineage.get("recipe")) not in (None, self.budget):
                self.average.budget_grew()
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
                self._choose_compute(shape)
                return self._train(tracker)

    def _train(self, tracker: Tracker | None) -> bool:
        total, done = float(self.budget.count), float(self.progress.done(self.budget.unit))
        with console.progress(self.recipe.name, total, self.budget.unit, done) as advance, self.stop:
            self.reporter.speed.pause(self.progress.tokens)
            while not self.finished:
                before = self.progress
                self._step()
                self._after_step(before, tracker, advance if self.rank.is_main else None)
                if not self.finished and self._stop_requested():
                    self._save(tracker, interrupted=True)
                    return False
        return True

    def _choose_compute(self, shape: tuple[int, int]) -> None:
        """Fix how the model is computed before the first step, and say it; a resumed run keeps what was chosen."""
        lowered = self.stepper.lowered
        if lowered is not None:
            console.say(f"On this GPU {lowered.lowered.summary()}.")
        elif self.stepper.extra and self.rank.device.type == "cuda":
            console.say(f"The losses {', '.join(self.stepper.extra)} read the plain pass: no kernels serve this step.")
        if self.stepper.memory is not None:
            plain = "; kernels see one chunk alone, so all layers are plain" if self.rank.device.type == "cuda" else ""
            console.say(f"Each chunk attends to the {self.stepper.memory.length:,} tokens before it{plain}.")
        if self.compute is None:
            parts = set() if lowered is None else lowered.lowered.parts
            self.compute = choose_compute(self.model, parts, shape, self.rank, self.dtype)
        use_compute(self.model, self.compute)

    def _step(self) -> None:
        before, share = self.progress, self.progress.share(self.budget)
        self.stepper.scale_dropout(self.dropout_schedule(share))
        self.stepper.scale_temperature(self.temperature_schedule(int(share * TEMPERATURE_LEVELS) / TEMPERATURE_LEVELS))
        row_length = length_at(self.recipe.training.lengths, share)
        batch = self.loader.next_batch(share, self._left("words"), self._left("tokens"), row_length)
        self.progress = before.plus(batch.token_count, batch.word_count)
        self.rate = self.learning_rate(before, self.progress)
        self.stepper.open_modules(self._opening())
        batch = self.stepper.begin_step(before.steps, share, batch)
        report = self.stepper.step(
            batch.inputs,
            batch.labels,
            batch.target_count,
            self.rate,
            continues=batch.whole.continues,
            read_again=not batch.is_last_piece,
        )
        if self.average is not None:
            self.average.update(self.progress.share(self.budget))
        self.reporter.metrics.add(self.progress.steps, report)
        if self.rank.device.type == "cpu":
            self._check_finite()

    def _opening(self) -> float:
        """How far inserted modules are open in a step, from its end, so that they are open a little in the first."""
        share, duration = self.progress.share(self.budget), self.recipe.training.opening
        return min(share / duration, 1.0) if duration else 1.0

    def _left(self, unit: str) -> int | None:
        """How many words or tokens the next batch may have, so that every mark in that unit is met exactly."""
        done, pace = self.progress.done(unit), self.recipe.checkpoints.every
        marks = [self.budget.count if self.budget.unit == unit else None]
        marks += [pace.next_after(done) if pace.unit == unit else None]
        return min((mark - done for mark in marks if mark is not None), default=None)

    def _after_step(self, before: Progress, tracker: Tracker | None, advance: Callable | None) -> None:
        now = self.progress
        if self.finished or self._at_record():
            self._check_finite()
            record = self.reporter.record_losses(now, self.rate, self.loader.epochs, tracker)
            if advance is not None:
                advance(now.done(self.budget.unit), progress_note(record))
        validating = self.finished or self._due(self.recipe.validation.every, before)
        if validating and self.reporter.held_out:
            self.reporter.validate(now, self.finished, tracker)
        if self._due(self.recipe.samples.every, before) or (self.recipe.samples.every is None and validating):
            self.reporter.sample(now, tracker)
        if self.finished or self._due(self.recipe.checkpoints.every, before):
            self._save(tracker)

    def _at_record(self) -> bool:
        return self.progress.steps % self.recipe.log.every == 0

    def _due(self, pace: Pace | None, before: Progress) -> bool:
        """Whether a mark of the pace was reached in the last step."""
        if pace is None:
            return False
        mark = pace.next_after(before.done(pace.unit))
        return mark is not None and self.progress.done(pace.unit) >= mark

    def _stop_requested(self) -> bool:
        """Processes must agree, which synchronises: on several GPUs only where a record synchronises anyway."""
        if self.rank.world_size > 1 and self.rank.device.type == "cuda" and not self._at_record():
            return False
        return self.stop.requested()

    def _check_finite(self) -> None:
        problem = self.reporter.metrics.read()
        if problem is None:
            return
        good = self.checkpoints.newest_good()
        last = "No checkpoint was saved yet."
        if good is not None:
            last = f"The last good checkpoint is {self.checkpoints.models / good} (a run may start_from it)."
        raise BraidError(
            problem,
            self.recipe.folder,
            f"{last} Try a lower training.optimizer.lr (now {self.recipe.training.optimizer.options.lr:g}), "
            "a longer training.warmup, or training.clip=1.0.",
        )

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
            "records": None if tracker is None else tracker.records,
        }
        facts = {**asdict(self.progress), **self.reporter.last, **self.reporter.averaging()}
        facts |= {"earlier_budgets": self.earlier_budgets} if self.earlier_budgets else {}
        facts |= {"interrupted": True} if interrupted else {}
        lineage = self.lineage(facts)
        name, tokenizer = checkpoint_name(self.recipe.checkpoints.every, self.progress), self.data.tokenizer
        self.checkpoints.save(name, self.state, position, tokenizer, lineage)
        self.saved_at = self.progress.steps
        self.reporter.speed.pause(self.progress.tokens)
