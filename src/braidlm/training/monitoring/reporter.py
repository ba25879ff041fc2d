"""What a run records and says of itself: losses and speed, validation, and samples of its own text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.decoding.decoder import Sampling
from braidlm.data.loading.open_data import OpenData
from braidlm.data.loading.validation import ValidationSet, validation_windows
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.heads.losses import IGNORED
from braidlm.training.amounts import Progress
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.features.feature import Feature, evaluating
from braidlm.training.monitoring.speed import SpeedMeter
from braidlm.training.monitoring.step_metrics import StepMetrics, UsageMonitor, choices_of, lowest_usage, usage_entropy
from braidlm.training.monitoring.tracking import Tracker
from braidlm.training.recipe import Recipe, SampleConfig
from braidlm.training.step.compute import StarvedThreads, autocast
from braidlm.training.step.parallel import Rank
from braidlm.training.trainable import Trainable


@dataclass
class Score:
    """How well a model predicts a text."""

    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float
    """Comparable between tokenizers."""
    tokens: int
    bytes: int


@torch.no_grad()
def score_text(trained: Trainable, text: ValidationSet, dtype: torch.dtype = torch.float32) -> Score:
    """Score every token of the text once."""
    model = trained.model
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, labels in text:
        used = (labels != IGNORED).any(1)  # rows of padding only are skipped
        tokens, targets = (torch.from_numpy(a[used]).to(device) for a in (inputs, labels))
        with autocast(device, dtype):
            total += trained.text_loss(tokens, targets).double()
    model.train(was_training)
    nats = total.item()
    loss = nats / text.tokens
    return Score(loss, safe_exp(loss), nats / math.log(2) / text.bytes, text.tokens, text.bytes)


def safe_exp(value: float) -> float:
    """exp without overflow."""
    return math.exp(value) if value < 700 else math.inf


def mean_bits_per_byte(scores: Iterable[Score]) -> float:
    """Bits per byte over several texts, weighted by their bytes."""
    listed = list(scores)
    return sum(s.bits_per_byte * s.bytes for s in listed) / sum(s.bytes for s in listed)


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


class Reporter:
    """Reports one run. `tracker`, where a method takes it, is None on all but the main process."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Trainable,
        data: OpenData,
        rank: Rank,
        dtype: torch.dtype,
        features: Sequence[Feature],
        flops_per_token: int,
    ):
        self.recipe, self.trained, self.tokenizer, self.rank, self.dtype = recipe, trained, data.tokenizer, rank, dtype
        self.features = features
        self.held_out = {
            stream.name: validation_windows(
                stream, recipe.data.length, recipe.validation.tokens, rows=recipe.training.batch
            )
            for stream in data.validation
        }
        self.metrics = StepMetrics(rank)
        self.usage_monitor = UsageMonitor(choices_of(trained.model))
        self.speed = SpeedMeter(flops_per_token, rank.device, rank.world_size)
        self.starved_threads = StarvedThreads()
        self.last: dict[str, Any] = {}
        """The newest loss and bits per byte, which a checkpoint keeps."""

    def record_losses(
        self, progress: Progress, rate: float, epochs: Mapping[str, float], tracker: Tracker | None
    ) -> dict[str, Any]:
        """Record the steps since the last record, whose metrics have been read; returns the record."""
        record = {
            "tokens": progress.tokens,
            "words": progress.words,
            "loss": self.metrics.take_mean(),
            "gradient_norm": self.metrics.norm,
            "learning_rate": rate,
            "epochs": {name: round(epoch, 3) for name, epoch in epochs.items()},
            **self._speed(progress),
            **self._usage(),
            **self._extra_losses(),
        }
        self.last["loss"] = record["loss"]
        if tracker is not None:
            tracker.record("train", progress.steps, **record)
        return record

    def _speed(self, progress: Progress) -> dict[str, Any]:
        facts = self.speed.read(progress.tokens)
        if self.rank.is_main and self.rank.device.type == "cpu":
            warning = self.starved_threads.update(torch.get_num_threads(), self.speed.cores, self.speed.seconds)
            if warning:
                console.warn(warning)
        return facts

    def _usage(self) -> dict[str, Any]:
        """How evenly routers use their choices."""
        usage = self.metrics.usage
        if not usage:
            return {}
        if self.rank.is_main and (warning := self.usage_monitor.update(usage)):
            console.warn(warning)
        return {
            "routing_loss": self.metrics.routing_loss,
            "usage": usage,
            "entropy": {name: round(usage_entropy(shares), 4) for name, shares in usage.items()},
            "lowest": {name: round(lowest_usage(shares), 4) for name, shares in usage.items()},
        }

    def _extra_losses(self) -> dict[str, Any]:
        if not self.metrics.extra:
            return {}
        read = {loss.kind: loss.readings() for loss in self.features if isinstance(loss, ExtraLoss)}
        others = {f"{name}.{what}": value for name, each in read.items() for what, value in each.items()}
        return {"extra_losses": self.metrics.extra | others}

    def validate(self, progress: Progress, finished: bool, tracker: Tracker | None) -> None:
        """Score the held-out text."""
        if tracker is not None:
            with evaluating(self.features):
                scores = self._scores()
            mean = self.last["bits_per_byte"] = mean_bits_per_byte(scores.values())
            half, averaging = self.recipe.validation.half, self.weights_facts()
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
            if averaging and finished:
                self._validate_own_weights(progress, tracker)
        self.speed.pause(progress.tokens)

    def _scores(self) -> dict[str, Score]:
        return {name: score_text(self.trained, text, self.dtype) for name, text in self.held_out.items()}

    def _validate_own_weights(self, progress: Progress, tracker: Tracker) -> None:
        """Say at the end what averaging changed; a training without it ends with these weights."""
        mean = mean_bits_per_byte(self._scores().values())
        tracker.record("last_weights", progress.steps, bits_per_byte=mean)
        console.say(f"Without averaging: {mean:.3f} bits per byte, in place of {self.last['bits_per_byte']:.3f}.")

    def weights_facts(self) -> dict[str, int]:
        """How many weights are averaged in what is validated and saved; nothing where they are the last step's."""
        return {key: value for one in self.features for key, value in one.facts().items()}

    def sample(self, progress: Progress, tracker: Tracker | None) -> None:
        """Let the model continue the recipe's prompts."""
        config = self.recipe.samples
        if tracker is not None and config.prompts:
            with evaluating(self.features):
                samples = write_samples(self.trained, self.tokenizer, config, self.recipe.seed)
            for prompt, text in samples:
                tracker.record("sample", progress.steps, prompt=prompt, text=text)
                console.say(f"  {prompt}{text}".replace("\n", "\n  "))
        self.speed.pause(progress.tokens)
