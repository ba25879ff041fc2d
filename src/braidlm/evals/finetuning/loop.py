"""Fine-tuning from one seed: epochs of steps, judged after each, until no better score has come for a while."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.evals.finetuning import batches
from braidlm.evals.finetuning.adapters import add_adapters, merge_adapters
from braidlm.evals.finetuning.classifier import classify, make_classifier
from braidlm.evals.finetuning.encoding import Encoded
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.evals.finetuning.measures import measures
from braidlm.evals.finetuning.step import Step, autocast


@dataclass(frozen=True)
class Lesson:
    """What is learned from and judged, as tokens."""

    train: Encoded
    train_labels: np.ndarray
    valid: Encoded
    valid_labels: np.ndarray
    classes: int | None
    """None where labels are numbers."""
    metric: str
    most: int
    """The most tokens that a text may have."""


@dataclass
class Tuned:
    """A model after fine-tuning, as it was after its best epoch."""

    classifier: nn.Module
    """A plain one: adapters are part of its matrices."""
    answers: np.ndarray
    """To the examples that are judged: classes or numbers."""
    trained: int
    """Parameters that were trained."""
    replayed: bool = False
    """Whether steps were recorded and replayed, which only saves time."""
    scores: list[float] = field(default_factory=list)
    """After each epoch."""
    losses: list[float] = field(default_factory=list)
    """Of each epoch, the mean over its steps."""

    @property
    def best_epoch(self) -> int:
        """Counted from 1."""
        return int(np.argmax(self.scores)) + 1


def fine_tune(
    model: Any,
    lesson: Lesson,
    how: Hyperparameters,
    seed: int,
    advance: Callable[[int], None] | None = None,
    replay: bool = True,
) -> Tuned:
    """Train a copy of a language model to answer; the model itself, and torch's random numbers, stay as they are.

    `advance` is called with the tokens that were read since the last call.
    """
    device = lesson.train.ids.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(False):
        torch.manual_seed(seed)
        classifier = make_classifier(model, lesson.classes or 1)
        adapted = add_adapters(classifier, how) if how.method == "lora" else None
        found = _trained(classifier, lesson, how, seed, advance or (lambda tokens: None), replay)
        if adapted is not None:
            found.classifier = merge_adapters(adapted)
    return found


def _trained(
    classifier: Any, lesson: Lesson, how: Hyperparameters, seed: int, advance: Callable[[int], None], replay: bool
) -> Tuned:
    dice = np.random.default_rng(seed)
    device = lesson.train.ids.device
    labels = _labels(lesson).to(device)
    step = Step(classifier, how, device, replay)
    found = Tuned(classifier, np.zeros(0), sum(parameter.numel() for parameter in step.parameters))
    steps = how.epochs * (len(lesson.train) // min(how.batch_size, len(lesson.train)))
    best: list[Tensor] = []
    done = 0
    for _ in range(how.epochs):
        classifier.train()
        step.loss.zero_()
        epoch = batches.training_batches(lesson.train.lengths, how.batch_size, dice)
        order = torch.from_numpy(np.concatenate(epoch)).to(device).split(len(epoch[0]))
        for which, index in zip(epoch, order, strict=True):
            ids = _ids(lesson, lesson.train, which, index)
            step(ids, lesson.train.lasts[index], labels[index], how.rate(done, steps))
            done += 1
            advance(int(lesson.train.lengths[which].sum()))
        found.losses.append(_mean_loss(step, len(epoch)))
        answers = answer(classifier, lesson, lesson.valid)
        advance(int(lesson.valid.lengths.sum()))
        found.scores.append(measures(answers, lesson.valid_labels, lesson.classes)[lesson.metric])
        if found.best_epoch == len(found.scores):
            found.answers = answers
            best = [parameter.detach().clone() for parameter in step.parameters]
        elif how.patience is not None and len(found.scores) - found.best_epoch >= how.patience:
            break
    found.replayed = step.replays
    with torch.no_grad():
        for parameter, kept in zip(step.parameters, best, strict=True):
            parameter.copy_(kept)
    return found


def _labels(lesson: Lesson) -> Tensor:
    labels = torch.from_numpy(lesson.train_labels)
    return labels.float() if lesson.classes is None else labels


def _ids(lesson: Lesson, texts: Encoded, which: np.ndarray, index: Tensor) -> Tensor:
    """The tokens of some texts, as wide as the longest of them needs, rounded up."""
    step = batches.width_step(texts.ids.device.type)
    width = batches.rounded(int(texts.lengths[which].max()), step, lesson.most)
    ids = texts.ids[index, :width]
    return ids if ids.shape[1] == width else torch.nn.functional.pad(ids, (0, width - ids.shape[1]))


def _mean_loss(step: Step, steps: int) -> float:
    loss = float(step.loss) / steps
    if not np.isfinite(loss):
        raise BraidError(
            "the loss is no longer a number",
            "fine-tuning",
            "Give a smaller learning rate with `--finetune-learning-rate`.",
        )
    return loss


@torch.no_grad()
def answer(classifier: Any, lesson: Lesson, texts: Encoded) -> np.ndarray:
    """[texts] the class that a classifier gives each, or the number."""
    classifier.eval()
    device = texts.ids.device
    places = batches.PLACES.get(device.type, batches.PLACES["cpu"])
    step = batches.width_step(device.type)
    order, found = [], []
    for which in batches.reading_batches(texts.lengths, places, step, lesson.most):
        index = torch.from_numpy(which).to(device)
        with autocast(device):
            logits, _ = classify(classifier, _ids(lesson, texts, which, index), texts.lasts[index])
        order.append(which)
        found.append(logits[:, 0] if lesson.classes is None else logits.argmax(-1))
    answers = torch.cat(found).cpu().numpy()
    back = np.empty_like(answers)
    back[np.concatenate(order)] = answers
    return back.astype(np.float64) if lesson.classes is None else back
