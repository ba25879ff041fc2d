"""A task that a model is fine-tuned for: the mean over seeds, and their standard deviation."""

import math
from dataclasses import dataclass

import numpy as np

from braidlm.core.models.adapters import check_peft
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.data_sets import DataSet
from braidlm.evals.finetuning.encoding import encode
from braidlm.evals.finetuning.examples import LabelledData
from braidlm.evals.finetuning.hyperparameters import Hyperparameters, hyperparameters_for, seeds_for
from braidlm.evals.finetuning.loop import FineTunedModel, TokenizedData, fine_tune
from braidlm.evals.finetuning.metrics import all_metrics, constant_answer, standard_error
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.statistics.from_scipy import check_scipy


@dataclass
class LabelledTask:
    """A labelled data set, read and checked."""

    data: LabelledData

    @property
    def count(self) -> int:
        return len(self.data.valid)

    @property
    def sha256(self) -> str:
        return self.data.sha256

    def check(self, settings: Settings) -> None:
        """Refuse invalid hyperparameters, adapters without peft, and correlations without SciPy."""
        if self.data.data_set.labels is None:
            check_scipy()
        if hyperparameters_for(self.data.data_set.name, settings).method == "lora":
            check_peft("train all parameters with `--finetune full`.")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Fine-tune a copy of the model from each seed, and evaluate it."""
        self.check(model.settings)
        hyperparameters = hyperparameters_for(self.data.data_set.name, model.settings)
        seeds = seeds_for(model.settings)
        data = self.tokenize(model, hyperparameters)
        tokens_per_seed = hyperparameters.epochs * int(data.train.lengths.sum() + data.valid.lengths.sum())
        total, done, tuned = tokens_per_seed * len(seeds), 0, []

        def add(tokens: int) -> None:
            nonlocal done
            done += tokens
            if advance is not None:
                advance(min(done, total), total)

        for finished, seed in enumerate(seeds, 1):
            tuned.append(fine_tune(model.model, data, hyperparameters, seed, add))
            add(finished * tokens_per_seed - done)  # a seed that ends early counts as whole
        return task_result(task, data, hyperparameters, seeds, tuned, self.data.data_set)

    def tokenize(self, model: EvaluatedModel, hyperparameters: Hyperparameters) -> TokenizedData:
        """The examples as this model's tokens, on its device."""
        examples = (self.data.train, self.data.valid)
        max_length = min(hyperparameters.length, model.scorer.context or hyperparameters.length)
        train, valid = (encode(model.tokenizer, some.texts, max_length, model.device) for some in examples)
        classes, metric = self.data.data_set.classes, self.data.data_set.metric
        return TokenizedData(train, self.data.train.labels, valid, self.data.valid.labels, classes, metric, max_length)


def task_result(
    task: str,
    data: TokenizedData,
    hyperparameters: Hyperparameters,
    seeds: list[int],
    tuned: list[FineTunedModel],
    data_set: DataSet,
) -> TaskResult:
    """The result over all seeds."""
    metric, labels, classes = data.metric, data.valid_labels, data.classes
    metrics = [all_metrics(one.answers, labels, classes) for one in tuned]
    scores = [values[metric] for values in metrics]
    also = {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0] if name != metric}
    notes = {
        "method": hyperparameters.method,
        "seeds": {str(seed): score for seed, score in zip(seeds, scores, strict=True)},
        "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "best epochs": [one.best_epoch for one in tuned],
        "epochs": [len(one.scores) for one in tuned],
        "trained parameters": tuned[0].trained,
        "examples": len(data.train),
    }
    if classes is not None:
        notes["majority class"] = constant_answer("accuracy", labels, classes)
    return TaskResult(
        task=task,
        metric=f"{metric}, %",
        score=float(np.mean(scores)),
        count=len(labels),
        standard_error=_total_error(metric, data, tuned, scores),
        chance=constant_answer(metric, labels, classes),
        also=also,
        notes=notes,
        items={data_set.name: tuned[0].answers.tolist()},
    )


def _total_error(metric: str, data: TokenizedData, tuned: list[FineTunedModel], scores: list[float]) -> float | None:
    """Of the mean over seeds, over samples of items and of seeds."""
    errors = [standard_error(metric, one.answers, data.valid_labels, data.classes) for one in tuned]
    of_items = [error for error in errors if error is not None]
    if not of_items:
        return None
    of_seeds = float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else 0.0
    return math.sqrt(float(np.mean(of_items)) ** 2 + of_seeds)
