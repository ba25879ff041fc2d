"""A task that a model is fine-tuned for: the mean over seeds, and how far they lie apart."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braidlm.evals.finetuning.adapters import check_peft
from braidlm.evals.finetuning.data_sets import DataSet
from braidlm.evals.finetuning.encoding import encode
from braidlm.evals.finetuning.examples import LabelledData, read_labelled
from braidlm.evals.finetuning.hyperparameters import Hyperparameters, chosen, seeds_of
from braidlm.evals.finetuning.loop import Lesson, Tuned, fine_tune
from braidlm.evals.finetuning.measures import constant_answer, measures, standard_error
from braidlm.evals.reports.results import TaskResult
from braidlm.evals.scoring.contestant import Contestant, Settings
from braidlm.evals.scoring.scorer import Advance


@dataclass
class LabelledTask:
    """Examples to learn from and examples to judge."""

    data: LabelledData

    @property
    def count(self) -> int:
        return len(self.data.valid)

    @property
    def sha256(self) -> str:
        return self.data.sha256

    def check(self, settings: Settings) -> None:
        """Refuse hyperparameters that make no sense, and adapters where there is no peft."""
        seeds_of(settings)
        if chosen(self.data.of.name, settings).method == "lora":
            check_peft()

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Fine-tune a copy of the model from each seed, and judge it."""
        self.check(model.settings)
        how = chosen(self.data.of.name, model.settings)
        seeds = seeds_of(model.settings)
        lesson = self.lesson(model, how)
        show = _Shown(advance, lesson, how.epochs, len(seeds))
        tuned = []
        for seed in seeds:
            tuned.append(fine_tune(model.model, lesson, how, seed, show.read))
            show.finish_seed()
        return result(task, lesson, how, seeds, tuned, self.data.of)

    def lesson(self, model: Contestant, how: Hyperparameters) -> Lesson:
        """The examples as this model's tokens, on its device."""
        data = self.data
        most = min(how.length, model.scorer.context or how.length)
        train, valid = (encode(model.tokenizer, some.texts, most, model.device) for some in (data.train, data.valid))
        return Lesson(train, data.train.labels, valid, data.valid.labels, data.of.classes, data.of.metric, most)


def open_labelled(of: DataSet, place: Path) -> LabelledTask:
    """A data set, read and checked."""
    return LabelledTask(read_labelled(of, place))


def result(
    task: str, lesson: Lesson, how: Hyperparameters, seeds: list[int], tuned: list[Tuned], of: DataSet
) -> TaskResult:
    """What the answers of all seeds mean."""
    metric, labels, classes = lesson.metric, lesson.valid_labels, lesson.classes
    each = [measures(one.answers, labels, classes) for one in tuned]
    scores = [found[metric] for found in each]
    also = {name: float(np.mean([found[name] for found in each])) for name in each[0] if name != metric}
    notes = {
        "method": how.method,
        "seeds": {str(seed): score for seed, score in zip(seeds, scores, strict=True)},
        "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "best epochs": [one.best_epoch for one in tuned],
        "epochs": [len(one.scores) for one in tuned],
        "trained parameters": tuned[0].trained,
        "examples": len(lesson.train),
    }
    if classes is not None:
        notes["majority class"] = constant_answer("accuracy", labels, classes)
    return TaskResult(
        task=task,
        metric=f"{metric}, %",
        score=float(np.mean(scores)),
        count=len(labels),
        standard_error=_whole_error(metric, lesson, tuned, scores),
        chance=constant_answer(metric, labels, classes),
        also=also,
        notes=notes,
        items={of.name: tuned[0].answers.tolist()},
    )


def _whole_error(metric: str, lesson: Lesson, tuned: list[Tuned], scores: list[float]) -> float | None:
    """Of the mean over seeds: other items might have come, and other seeds."""
    found = [standard_error(metric, one.answers, lesson.valid_labels, lesson.classes) for one in tuned]
    of_items = [error for error in found if error is not None]
    if not of_items:
        return None
    of_seeds = float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else 0.0
    return math.sqrt(float(np.mean(of_items)) ** 2 + of_seeds)


class _Shown:
    """Progress in tokens over all seeds and epochs; a seed that ends early counts as whole."""

    def __init__(self, advance: Advance | None, lesson: Lesson, epochs: int, seeds: int):
        self.advance = advance
        self.of_seed = epochs * int(lesson.train.lengths.sum() + lesson.valid.lengths.sum())
        self.total = self.of_seed * seeds
        self.finished, self.tokens = 0, 0

    def read(self, tokens: int) -> None:
        self.tokens += tokens
        if self.advance is not None:
            self.advance(min(self.finished * self.of_seed + self.tokens, self.total), self.total)

    def finish_seed(self) -> None:
        self.finished, self.tokens = self.finished + 1, 0
        self.read(0)
