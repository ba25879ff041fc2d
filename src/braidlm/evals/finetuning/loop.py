"""Fine-tuning from one seed: epochs of steps with validation after each, and early stopping."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.evals.finetuning import batches
from braidlm.evals.finetuning.adapters import add_adapters
from braidlm.evals.finetuning.classifier import classify, make_classifier
from braidlm.evals.finetuning.encoding import EncodedTexts
from braidlm.evals.finetuning.hyperparameters import Hyperparameters
from braidlm.evals.finetuning.metrics import all_metrics
from braidlm.evals.finetuning.step import TrainingStep, autocast


@dataclass(frozen=True)
class TokenizedData:
    """The training and validation examples of a data set as tokens."""

    train: EncodedTexts
    train_labels: np.ndarray
    valid: EncodedTexts
    valid_labels: np.ndarray
    classes: int | None
    """None where labels are numbers."""
    metric: str
    max_length: int
    """The maximum tokens of a text."""


@dataclass
class FineTunedModel:
    """A model after fine-tuning, with the parameters of its best epoch."""

    classifier: nn.Module
    """Adapters are merged into its matrices."""
    answers: np.ndarray
    """To the validation examples: classes or numbers."""
    trained: int
    """The number of trained parameters."""
    replayed: bool = False
    """Whether steps were replayed as CUDA graphs, which only saves time."""
    scores: list[float] = field(default_factory=list)
    """Of the validation examples after each epoch."""
    losses: list[float] = field(default_factory=list)
    """The mean over the steps of each epoch."""

    @property
    def best_epoch(self) -> int:
        """Counted from 1."""
        return int(np.argmax(self.scores)) + 1


def fine_tune(
    model: Any,
    data: TokenizedData,
    hyperparameters: Hyperparameters,
    seed: int,
    advance: Callable[[int], None] | None = None,
    replay: bool = True,
) -> FineTunedModel:
    """Fine-tune a copy of a language model; the model itself, and torch's random state, stay as they are.

    `advance` is called with the number of tokens since the last call.
    """
    device = data.train.ids.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(False):
        torch.manual_seed(seed)
        classifier = make_classifier(model, data.classes or 1)
        adapted = add_adapters(classifier, hyperparameters) if hyperparameters.method == "lora" else None
        tuned = _train(classifier, data, hyperparameters, seed, advance or (lambda tokens: None), replay)
        if adapted is not None:
            tuned.classifier = adapted.merge_and_unload()
    return tuned


def _train(
    classifier: Any,
    data: TokenizedData,
    hyperparameters: Hyperparameters,
    seed: int,
    advance: Callable[[int], None],
    replay: bool,
) -> FineTunedModel:
    rng = np.random.default_rng(seed)
    device = data.train.ids.device
    labels = torch.from_numpy(data.train_labels).to(device, torch.float32 if data.classes is None else torch.int64)
    step = TrainingStep(classifier, hyperparameters, device, replay)
    tuned = FineTunedModel(classifier, np.zeros(0), sum(parameter.numel() for parameter in step.parameters))
    steps = hyperparameters.epochs * (len(data.train) // min(hyperparameters.batch_size, len(data.train)))
    best: list[Tensor] = []
    done = 0
    for _ in range(hyperparameters.epochs):
        classifier.train()
        step.loss.zero_()
        epoch = batches.training_batches(data.train.lengths, hyperparameters.batch_size, rng)
        order = torch.from_numpy(np.concatenate(epoch)).to(device).split(len(epoch[0]))
        for indices, index in zip(epoch, order, strict=True):
            ids = _ids(data, data.train, indices, index)
            step(ids, data.train.last_positions[index], labels[index], hyperparameters.rate(done, steps))
            done += 1
            advance(int(data.train.lengths[indices].sum()))
        tuned.losses.append(_mean_loss(step, len(epoch)))
        answers = predict(classifier, data, data.valid)
        advance(int(data.valid.lengths.sum()))
        tuned.scores.append(all_metrics(answers, data.valid_labels, data.classes)[data.metric])
        if tuned.best_epoch == len(tuned.scores):
            tuned.answers = answers
            best = [parameter.detach().clone() for parameter in step.parameters]
        elif hyperparameters.patience is not None and len(tuned.scores) - tuned.best_epoch >= hyperparameters.patience:
            break
    tuned.replayed = step.replays
    with torch.no_grad():
        for parameter, value in zip(step.parameters, best, strict=True):
            parameter.copy_(value)
    return tuned


def _ids(data: TokenizedData, texts: EncodedTexts, indices: np.ndarray, index: Tensor) -> Tensor:
    """The tokens of some texts, padded to the width of the longest, rounded up."""
    multiple = batches.width_multiple(texts.ids.device.type)
    width = batches.padded_width(int(texts.lengths[indices].max()), multiple, data.max_length)
    ids = texts.ids[index, :width]
    return ids if ids.shape[1] == width else torch.nn.functional.pad(ids, (0, width - ids.shape[1]))


def _mean_loss(step: TrainingStep, steps: int) -> float:
    loss = float(step.loss) / steps
    if not np.isfinite(loss):
        raise BraidError(
            "the loss is no longer a number",
            "fine-tuning",
            "Give a smaller learning rate with `--finetune-learning-rate`.",
        )
    return loss


@torch.no_grad()
def predict(classifier: Any, data: TokenizedData, texts: EncodedTexts) -> np.ndarray:
    """[texts] the classes or numbers that a classifier predicts."""
    classifier.eval()
    device = texts.ids.device
    max_tokens = batches.TOKENS_PER_PASS.get(device.type, batches.TOKENS_PER_PASS["cpu"])
    multiple = batches.width_multiple(device.type)
    order, outputs = [], []
    for indices in batches.evaluation_batches(texts.lengths, max_tokens, multiple, data.max_length):
        index = torch.from_numpy(indices).to(device)
        with autocast(device):
            logits, _ = classify(classifier, _ids(data, texts, indices, index), texts.last_positions[index])
        order.append(indices)
        outputs.append(logits[:, 0] if data.classes is None else logits.argmax(-1))
    sorted_answers = torch.cat(outputs).cpu().numpy()
    answers = np.empty_like(sorted_answers)
    answers[np.concatenate(order)] = sorted_answers
    return answers.astype(np.float64) if data.classes is None else answers
