"""The training loop: batches in, metrics, samples and checkpoints out."""

import math
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.data.catalog import OpenData
from braidlm.data.chunking import chunkings
from braidlm.data.loader import Loader
from braidlm.data.validation import validation_windows
from braidlm.model.accounting import model_cost
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Pace, short
from braidlm.training.checkpoints import Checkpoints
from braidlm.training.parallel import Place, sum_over_processes
from braidlm.training.precision import choose_dtype
from braidlm.training.progress import Progress, Speedometer, progress_note
from braidlm.training.recipe import Recipe
from braidlm.training.samples import write_samples
from braidlm.training.schedules import dropout_schedules, schedules
from braidlm.training.step import Stepper
from braidlm.training.tracking import Tracker
from braidlm.training.validation import mean_bits_per_byte, score_text


class Trainer:
    """One run in memory."""

    def __init__(
        self,
        recipe: Recipe,
        model: BraidForCausalLM,
        data: OpenData,
        checkpoints: Checkpoints,
        lineage: Callable[[dict[str, Any]], dict[str, Any]],
        place: Place,
    ):
        self.recipe, self.model, self.data, self.place = recipe, model, data, place
        self.checkpoints, self.lineage = checkpoints, lineage
        training = recipe.training
        self.budget = training.budget
        self.dtype = choose_dtype(training.precision, place.device)
        self.stepper = Stepper(model, training, place, self.dtype)
        self.loader = Loader(
            data.train,
            chunkings.build(recipe.data.chunking),
            recipe.data.length,
            rows=training.batch,
            accumulation=training.accumulation,
            seed=recipe.seed,
            mix=recipe.data.mix,
            rank=place.rank,
            world=place.world,
        )
        self.held_out = {
            stream.name: validation_windows(stream, recipe.data.length, recipe.validation.tokens, rows=training.batch)
            for stream in data.validation
        }
        self.rate_curve = schedules.build(training.schedule)
        self.dropout_curve = dropout_schedules.build(training.dropout)
        self.progress = Progress()
        self.speed = Speedometer(model_cost(model, recipe.data.length).flops_per_token, place.device, place.world)
        self.unread: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.last: dict[str, Any] = {}
        self.stop_asked = False

    def restore(self, name: str) -> None:
        """Go on exactly where a checkpoint was taken."""
        position = self.checkpoints.restore(name, self.model, self.stepper.optimizer)
        self.progress = Progress(**position["progress"])
        self.loader.load_state(position["loader"])
        self.last = position.get("last", {})

    def run(self, tracker: Tracker | None) -> bool:
        """Train to the budget; False if it was asked to stop before. `tracker` is None on all but the main process."""
        total = float(self.budget.count)
        with console.progress(self.recipe.name, total, self.budget.unit) as advance, self._stopping_gently():
            self.speed.pause(self.progress.tokens)
            while self.progress.done(self.budget.unit) < self.budget.count:
                before = Progress(**self.progress.as_dict())
                self._step()
                self._after_step(before, tracker, advance if self.place.is_main else None)
                if self.stop_asked:
                    self._save()
                    return False
        return True

    def _step(self) -> None:
        share = self.progress.share(self.budget)
        self.stepper.scale_dropout(self.dropout_curve(share))
        batch = self.loader.next_batch(share, self._left("words"), self._left("tokens"))
        loss, norm = self.stepper.step(batch.inputs, batch.labels, batch.label_count, self._rate())
        self.progress.steps += 1
        self.progress.tokens += batch.token_count
        self.progress.words += batch.word_count
        self.unread.append((self.progress.steps, loss, norm))
        if self.place.device.type == "cpu":
            self._check_finite()

    def _left(self, unit: str) -> int | None:
        """How many words or tokens the next batch may have, so that every mark in that unit is met exactly."""
        marks = []
        if self.budget.unit == unit:
            marks.append(self.budget.count)
        if self.recipe.checkpoints.every.unit == unit:
            marks.append(self.recipe.checkpoints.every.next_after(self.progress.done(unit)))
        known = [mark for mark in marks if mark is not None]
        return self.progress.left(min(known), unit) if known else None

    def _rate(self) -> float:
        """The learning rate of the coming step."""
        training, warmup = self.recipe.training, self.recipe.training.warmup
        share = self.progress.share(self.budget)
        begin = min(warmup.count / self.budget.count, 1.0) if warmup.unit == self.budget.unit else 0.0
        risen = 1.0
        if warmup.count:
            # Counting the coming step in, so that the first step is not wasted on a rate of zero.
            done = self.progress.done(warmup.unit)
            coming = done + 1 if warmup.unit == "steps" else done + done / max(self.progress.steps, 1)
            risen = min(max(coming, 1) / warmup.count, 1.0)
        curve = self.rate_curve((share - begin) / (1 - begin)) if share > begin else self.rate_curve(0.0)
        return training.optimizer.lr * risen * curve

    def _after_step(self, before: Progress, tracker: Tracker | None, advance: Callable | None) -> None:
        finished = self.progress.done(self.budget.unit) >= self.budget.count
        if self.progress.steps % self.recipe.log.every == 0 or finished:
            self._log(tracker, advance)
        validating = finished or self._due(self.recipe.validation.every, before)
        if validating and self.held_out:
            self._validate(tracker)
        if self._due(self.recipe.samples.every, before) or (self.recipe.samples.every is None and validating):
            self._sample(tracker)
        if finished or self._due(self.recipe.checkpoints.every, before):
            self._save()

    def _due(self, pace: Pace | None, before: Progress) -> bool:
        """Whether a mark of the pace was reached in the last step."""
        if pace is None:
            return False
        mark = pace.next_after(before.done(pace.unit))
        return mark is not None and self.progress.done(pace.unit) >= mark

    def _check_finite(self) -> list[tuple[int, float, float]]:
        """The numbers of all steps since the last look; stops the run at the first that is not finite."""
        if not self.unread:
            return []
        losses = sum_over_processes(torch.stack([loss for _, loss, _ in self.unread]), self.place).tolist()
        norms = torch.stack([norm for _, _, norm in self.unread]).tolist()
        steps = [step for step, _, _ in self.unread]
        self.unread.clear()
        seen = list(zip(steps, losses, norms, strict=True))
        for step, loss, norm in seen:
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._stop_at(step, "loss" if not math.isfinite(loss) else "gradient")
        self.seen = [*getattr(self, "seen", []), *seen]
        return seen

    def _stop_at(self, step: int, what: str) -> None:
        good = self.checkpoints.newest_good()
        kept = (
            f"The last good checkpoint is {self.checkpoints.models / good}" if good else "No checkpoint was saved yet"
        )
        raise BraidError(
            f"the {what} became infinite or not a number at step {step}",
            self.recipe.folder,
            f"{kept}. Try a lower training.optimizer.lr (now {self.recipe.training.optimizer.lr:g}), "
            "a longer training.warmup, or training.clip=1.0.",
        )

    def _log(self, tracker: Tracker | None, advance: Callable | None) -> None:
        self._check_finite()
        losses = [loss for _, loss, _ in self.seen]
        record = {
            **self.progress.as_dict(),
            "loss": sum(losses) / len(losses),
            "gradient_norm": self.seen[-1][2],
            "learning_rate": self._rate(),
            "epochs": {name: round(epoch, 3) for name, epoch in self.loader.epochs.items()},
            **self.speed.read(self.progress.tokens),
        }
        self.seen = []
        self.last = {"loss": record["loss"]} | {k: v for k, v in self.last.items() if k != "loss"}
        record.pop("steps")
        if tracker is not None:
            tracker.record("train", self.progress.steps, **record)
        if advance is not None:
            advance(self.progress.done(self.budget.unit), progress_note(record))

    def _validate(self, tracker: Tracker | None) -> None:
        if tracker is not None:
            scores = {name: score_text(self.model, text, self.dtype) for name, text in self.held_out.items()}
            mean = mean_bits_per_byte(scores.values())
            self.last["bits_per_byte"] = mean
            facts = {name: vars(score) for name, score in scores.items()}
            tracker.record(
                "validation",
                self.progress.steps,
                tokens=self.progress.tokens,
                words=self.progress.words,
                bits_per_byte=mean,
                sets=facts,
            )
            shown = "  ".join(f"{n} {s.bits_per_byte:.3f} (perplexity {s.perplexity:.2f})" for n, s in scores.items())
            console.say(f"step {self.progress.steps:,}: validation bits per byte: {shown}")
        self.speed.pause(self.progress.tokens)

    def _sample(self, tracker: Tracker | None) -> None:
        config = self.recipe.samples
        if tracker is not None and config.prompts:
            for prompt, text in write_samples(self.model, self.data.tokenizer, config, self.recipe.seed):
                tracker.record("sample", self.progress.steps, prompt=prompt, text=text)
                console.say(f"  {prompt}{text}".replace("\n", "\n  "))
        self.speed.pause(self.progress.tokens)

    def _save(self) -> None:
        self._check_finite()  # a checkpoint must be a good one
        name = self._checkpoint_name()
        training = {**self.progress.as_dict(), **self.last}
        self.checkpoints.save(
            name,
            self.model,
            self.stepper.optimizer,
            {"progress": self.progress.as_dict(), "loader": self.loader.state(), "last": self.last},
            self.data.tokenizer,
            self.lineage(training),
        )
        self.speed.pause(self.progress.tokens)

    def _checkpoint_name(self) -> str:
        """By the unit of the pace: step-001000, chck_10M (words, as the BabyLM pipeline wants), tokens-5M."""
        unit = self.recipe.checkpoints.every.unit
        if unit == "steps":
            return f"step-{self.progress.steps:06d}"
        return f"{'chck_' if unit == 'words' else 'tokens-'}{short(self.progress.done(unit))}"

    def _stopping_gently(self) -> "_GentleStop":
        return _GentleStop(self)


class _GentleStop:
    """While training, Ctrl-C or a terminate signal finishes the step, saves and stops; a second one stops at once."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __enter__(self) -> None:
        try:
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals stay as they are
            self.before = {}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.trainer.stop_asked:
            raise KeyboardInterrupt
        self.trainer.stop_asked = True
