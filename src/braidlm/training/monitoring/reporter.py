"""What a run records and says of itself: losses and speed, validation, and samples of its own text."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from braidlm.core import console
from braidlm.core.decoding.decoder import Sampling
from braidlm.core.devices import PeakMemory
from braidlm.data.loading.open_data import OpenData
from braidlm.data.loading.validation import ValidationSet, validation_windows
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.heads.losses import IGNORED
from braidlm.training.amounts import Progress
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.feature import evaluating
from braidlm.training.monitoring.speed import SpeedMeter
from braidlm.training.monitoring.tracking import Tracker
from braidlm.training.recipe import Recipe, SampleConfig
from braidlm.training.step.compute import StarvedThreads, autocast
from braidlm.training.step.parallel import Rank, sum_over_processes
from braidlm.training.step.sharding import gathered_ends
from braidlm.training.step.spread import is_spread
from braidlm.training.step.step import Stepper, StepReport
from braidlm.training.trainable import Trainable

HARDLY_USED = 0.05  # a choice below this share of an even load counts as unused
USAGE_PATIENCE = 10
"""Consecutive records with a hardly used choice before the warning, because routers are unsteady at first."""


class Reporter:
    """Reports one run. `tracker`, where a method takes it, is None on all but the main process."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Trainable,
        data: OpenData,
        stepper: Stepper,
        flops_per_token: int,
        memory: PeakMemory,
    ):
        self.memory = memory
        self.recipe, self.trained, self.tokenizer, self.rank = recipe, trained, data.tokenizer, stepper.rank
        self.stepper, self.features, self.objective = stepper, stepper.features, stepper.objective
        length, most, rows = recipe.data.length, recipe.validation.tokens, recipe.training.batch
        self.held_out = {one.name: validation_windows(one, length, most, rows) for one in data.validation}
        self.metrics = StepMetrics(self.rank)
        parts: list[Any] = [module for module in trained.model.modules() if hasattr(module, "address")]
        named: dict[str, Any] = {
            one.address: getattr(one, "choices", None) or getattr(one, "names", ()) for one in parts
        }
        self.usage_monitor = UsageMonitor(named)  # of routers and joins
        self.speed = SpeedMeter(flops_per_token, self.rank.device, self.rank.world_size)
        self.starved_threads = StarvedThreads()
        self.last: dict[str, Any] = {}  # the newest loss and bits per byte, which a checkpoint keeps

    def record_losses(
        self, progress: Progress, rate: float, epochs: Mapping[str, float], tracker: Tracker | None
    ) -> dict[str, Any]:
        """Record the steps since the last record, whose metrics have been read; returns the record."""
        metrics, usage = self.metrics, self.metrics.usage
        losses, metrics.losses = metrics.losses, []
        record: dict[str, Any] = {
            "tokens": progress.tokens,
            "words": progress.words,
            "loss": sum(losses) / len(losses),
            "gradient_norm": metrics.norm,
            "learning_rate": rate,
            "epochs": {name: round(epoch, 3) for name, epoch in epochs.items()},
            **self.speed.read(progress.tokens),
        }
        if (peak := self.memory.bytes()) is not None:
            record["memory"] = peak
        if usage:
            record["routing_loss"], record["usage"] = metrics.routing_loss, usage
            record["entropy"] = {name: round(usage_entropy(shares), 4) for name, shares in usage.items()}
            record["lowest"] = {name: round(lowest_usage(shares), 4) for name, shares in usage.items()}
        if metrics.extra:
            read = {loss.kind: loss.readings() for loss in self.features if isinstance(loss, ExtraLoss)}
            others = {f"{name}.{what}": value for name, each in read.items() for what, value in each.items()}
            record["extra_losses"] = metrics.extra | others
        for one in self.features:
            if not isinstance(one, ExtraLoss):
                record |= one.readings()
        self.last["loss"] = record["loss"]
        if tracker is not None:
            warnings = [self.usage_monitor.update(usage)]
            if self.rank.device.type == "cpu":
                threads = torch.get_num_threads()
                warnings.append(self.starved_threads.update(threads, self.speed.cores, self.speed.seconds))
            for warning in filter(None, warnings):
                console.warn(warning)
            tracker.record("train", progress.steps, **record)
        return record

    def validate(self, progress: Progress, finished: bool, tracker: Tracker | None) -> None:
        """Score the held-out text: each process reads a part of it."""
        with self.speed.paused():
            with evaluating(self.features):
                scores, averaging = self._scores(), self.weights_facts()
            own = self._scores() if averaging and finished else {}
        if tracker is not None:
            mean = self.last["bits_per_byte"] = mean_bits_per_byte(scores.values())
            half = self.recipe.validation.half
            tracker.record(
                "validation",
                progress.steps,
                tokens=progress.tokens,
                words=progress.words,
                bits_per_byte=mean,
                **({} if half is None else {"half": half}),
                **averaging,
                sets={name: vars(score) for name, score in scores.items()},
            )
            shown = "  ".join(f"{n} {s.bits_per_byte:.3f} (perplexity {s.perplexity:.2f})" for n, s in scores.items())
            where = "" if half is None else f" ({half} half)"
            where += f" of averaged weights ({averaging['averaged']:,})" if averaging else ""
            console.say(f"step {progress.steps:,}: validation bits per byte{where}: {shown}")
            if own:  # a training without averaging would end with the weights of the last step
                last = mean_bits_per_byte(own.values())
                tracker.record("last_weights", progress.steps, bits_per_byte=last)
                console.say(f"Without averaging: {last:.3f} bits per byte, in place of {mean:.3f}.")

    def _scores(self) -> "dict[str, Score]":
        with gathered_ends(self.objective):
            return {
                n: score_text(self.trained, text, self.stepper.dtype, self.rank) for n, text in self.held_out.items()
            }

    def weights_facts(self) -> dict[str, int]:
        """How many weights are averaged in what is validated and saved; nothing where they are the last step's."""
        return {key: value for one in self.features for key, value in one.facts().items()}

    def sample(self, progress: Progress, tracker: Tracker | None) -> None:
        """Let the model continue the recipe's prompts."""
        config = self.recipe.samples
        if config.prompts and (tracker is not None or is_spread(self.trained.model)):
            with self.speed.paused(), evaluating(self.features), gathered_ends(self.objective):
                samples = write_samples(self.trained, self.tokenizer, config, self.recipe.seed)
            for prompt, text in samples if tracker else ():
                assert tracker is not None
                tracker.record("sample", progress.steps, prompt=prompt, text=text)
                console.say(f"  {prompt}{text}".replace("\n", "\n  "))


@dataclass
class Score:
    """How well a model predicts a text."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float  # comparable between tokenizers
    tokens: int
    bytes: int


@torch.no_grad()
def score_text(
    trained: Trainable, text: ValidationSet, dtype: torch.dtype = torch.float32, rank: Rank | None = None
) -> Score:
    """Score every token of the text once; of several processes each reads its own share of the batches."""
    model = trained.model
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    batches, rank = iter(text), rank or Rank(0, 1, device)
    while together := list(islice(batches, rank.world_size)):
        # Where weights are gathered, all processes make the same passes: at the end some read what others count.
        inputs, labels = together[min(rank.index, len(together) - 1)]
        used = (labels != IGNORED).any(1)  # rows of padding only are skipped
        used[0] |= not used.any()  # but for one, since a decoder refuses a batch without rows; it adds nothing
        tokens, targets = (torch.from_numpy(a[used]).to(device) for a in (inputs, labels))
        with autocast(device, dtype):
            loss_of_batch = trained.text_loss(tokens, targets).double()
        total += loss_of_batch if rank.index < len(together) else 0.0
    model.train(was_training)
    nats = sum_over_processes(total, rank).item()
    loss = nats / text.tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Score(loss, perplexity, nats / math.log(2) / text.bytes, text.tokens, text.bytes)


def mean_bits_per_byte(scores: Collection[Score]) -> float:
    """Bits per byte over several texts, weighted by their bytes."""
    return sum(s.bits_per_byte * s.bytes for s in scores) / sum(s.bytes for s in scores)


def write_samples(
    trained: Trainable, tokenizer: BraidTokenizer, config: SampleConfig, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs; sampling has a generator of its own, so the training's random state stays."""
    texts = ["" for _ in config.prompts]
    was_training = trained.model.training
    sampling = Sampling(temperature=config.temperature, seed=seed)
    for piece in trained.continue_text(tokenizer, config.prompts, config.tokens, sampling):
        texts[piece.prompt] += piece.text
    trained.model.train(was_training)
    return list(zip(config.prompts, texts, strict=True))


@dataclass
class StepMetrics:
    """Metrics of the steps since the last record, copied from the device only when they are read."""

    rank: Rank
    losses: list[float] = field(default_factory=list)
    """The losses since the last record; saved with a checkpoint, so that a resumed run records the same mean."""
    norm: float = 0.0  # the gradient norm of the last step that was read
    routing_loss: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    """The recipe's extra losses in the last step that was read, without their weights."""
    usage: dict[str, list[float]] = field(default_factory=dict)  # for each router, in the last step that was read
    unread: list[tuple[int, StepReport]] = field(default_factory=list)  # reports of steps, still on the device

    def read(self) -> str | None:
        """Wait for the device; returns a message about the first step with a value that is not finite, or None."""
        if not self.unread:
            return None
        steps, reports = zip(*self.unread, strict=True)
        self.unread.clear()
        losses = self._summed([report.loss for report in reports])
        routing_losses = self._summed([report.routing_loss for report in reports])
        norms = torch.stack([report.gradient_norm for report in reports]).tolist()
        extra = {name: self._summed([report.extra[name] for report in reports]) for name in reports[0].extra}
        totals = map(sum, zip(losses, routing_losses, *extra.values(), strict=True))
        for step, loss, norm, report in zip(steps, totals, norms, reports, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(loss) else "loss"
                broken = [name for name, share in report.usage.items() if not bool(share.isfinite().all())]
                where = f", where router {broken[0]} gives scores that are not numbers" if broken else ""
                return f"the {what} became infinite or not a number at step {step}{where}"
        self.losses += losses
        self.norm, self.routing_loss = norms[-1], routing_losses[-1]
        self.extra = {name: values[-1] for name, values in extra.items()}
        self.usage = {name: share.tolist() for name, share in reports[-1].usage.items()}
        return None

    def _summed(self, shares: list[Tensor]) -> list[float]:
        return sum_over_processes(torch.stack(shares), self.rank).tolist()


def usage_entropy(usage: Sequence[float]) -> float:
    """The entropy of the usage divided by log N: 1 when all choices are used equally, 0 when one has everything."""
    if len(usage) < 2:
        return 1.0
    return -sum(share * math.log(share) for share in usage if share > 0) / math.log(len(usage))


def lowest_usage(usage: Sequence[float]) -> float:
    """The smallest usage relative to an even one: 1 when all are equal, 0 when a choice is never used."""
    return min(usage) * len(usage)


class UsageMonitor:
    """Warns once for each router that hardly uses one of its choices."""

    def __init__(self, choices: Mapping[str, Sequence[str]]) -> None:
        """`choices` are the names of what each router chooses among; a part of another package may tell none."""
        self.choices = choices
        self._records: dict[str, int] = {}
        """Consecutive records, up to the last, in which a choice of the router was hardly used."""
        self._warned: set[str] = set()

    def update(self, usage: Mapping[str, Sequence[float]]) -> str | None:
        """A warning after one more record, for all routers together; None if there is nothing new."""
        unused = []
        for router, shares in usage.items():
            self._records[router] = self._records.get(router, 0) + 1 if lowest_usage(shares) < HARDLY_USED else 0
            if self._records[router] >= USAGE_PATIENCE and router not in self._warned:
                self._warned.add(router)
                names = self.choices.get(router) or [f"choice {number + 1}" for number in range(len(shares))]
                unused.append(f"{router} ({names[shares.index(min(shares))]})")
        if not unused:
            return None
        return (
            f"routers that hardly use one of their choices (below {HARDLY_USED:.0%} of an even share in "
            f"{USAGE_PATIENCE} records in a row): {', '.join(unused)}. Where all are to be used, a larger weight of a "
            "balance loss spreads the tokens, such as `losses: {switch: 0.2}` of the router; what a text does not use "
            "can be pruned"
        )
