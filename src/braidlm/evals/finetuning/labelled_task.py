"""A task that a model is fine-tuned for: its labelled examples, and the mean score over seeds."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.models.adapters import check_peft
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.classifier import encode
from braidlm.evals.finetuning.data_sets import (
    DataSet,
    Examples,
    all_metrics,
    constant_answer,
    layout_of,
    read_examples,
    standard_error,
)
from braidlm.evals.finetuning.loop import (
    FineTunedModel,
    Hyperparameters,
    TokenizedData,
    fine_tune,
    hyperparameters_for,
    seeds_for,
)
from braidlm.evals.results import TaskResult
from braidlm.evals.rows import files_of, sha256_of_files
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.statistics import check_scipy


@dataclass(frozen=True)
class LabelledTask:
    """The training and the validation examples of a data set."""

    data_set: DataSet
    train: Examples
    valid: Examples
    sha256: str

    @property
    def count(self) -> int:
        return len(self.valid)

    def check(self, settings: Settings) -> None:
        """Refuse invalid hyperparameters, adapters without peft, and correlations without SciPy."""
        if self.data_set.labels is None:
            check_scipy()
        if hyperparameters_for(self.data_set.name, settings).method == "lora":
            check_peft("train all parameters with `--finetune full`.")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Fine-tune a copy of the model from each seed, and evaluate it."""
        self.check(model.settings)
        hyperparameters = hyperparameters_for(self.data_set.name, model.settings)
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
        return self.result(task, hyperparameters, seeds, tuned)

    def tokenize(self, model: EvaluatedModel, hyperparameters: Hyperparameters) -> TokenizedData:
        """The examples as this model's tokens, on its device."""
        examples = (self.train, self.valid)
        max_length = min(hyperparameters.length, model.scorer.context or hyperparameters.length)
        train, valid = (encode(model.tokenizer, some.texts, max_length, model.device) for some in examples)
        return TokenizedData(self.data_set, train, self.train.labels, valid, self.valid.labels, max_length)

    def result(self, task: str, used: Hyperparameters, seeds: list[int], tuned: list[FineTunedModel]) -> TaskResult:
        metric, labels, classes = self.data_set.metric, self.valid.labels, self.data_set.classes
        metrics = [all_metrics(one.answers, labels, classes) for one in tuned]
        scores = [values[metric] for values in metrics]
        errors = [standard_error(metric, one.answers, labels, classes) for one in tuned]
        of_items = [error for error in errors if error is not None]
        of_seeds = float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else 0.0
        notes = {
            "method": used.method,
            "seeds": {str(seed): score for seed, score in zip(seeds, scores, strict=True)},
            "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
            "best epochs": [one.best_epoch for one in tuned],
            "epochs": [len(one.scores) for one in tuned],
            "trained parameters": tuned[0].trained,
            "examples": len(self.train),
        }
        if classes is not None:
            notes["majority class"] = constant_answer("accuracy", labels, classes)
        # The error of the mean over seeds, over samples of items and of seeds.
        error = math.sqrt(float(np.mean(of_items)) ** 2 + of_seeds) if of_items else None
        means = {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}
        chance, items = constant_answer(metric, labels, classes), {self.data_set.name: tuned[0].answers.tolist()}
        result = TaskResult(task, f"{metric}, %", means.pop(metric), len(labels), error, chance=chance, items=items)
        return replace(result, also=means, notes=notes)


def read_labelled(data_set: DataSet, path: Path) -> LabelledTask:
    """A data set from its folder, or from its training file, which is beside the validation file."""
    files = layout_of(data_set, path)
    folder = path.parent if path.is_file() else path
    paths = [folder / files.train, folder / files.valid]
    train, valid = (read_examples(data_set, file, files) for file in paths)
    if data_set.labels is not None and len(set(train.labels.tolist())) < 2:
        only = data_set.labels[int(train.labels[0])]
        raise BraidError(f"every example has the label '{only}': there is nothing to learn", str(paths[0]))
    return LabelledTask(data_set, train, valid, sha256_of_files([file for path in paths for file in files_of(path)]))
