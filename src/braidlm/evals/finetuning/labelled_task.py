"""A task that a model is fine-tuned for: its labelled examples, and the mean score over seeds.

Examples are read from the files of a data set and checked line by line.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.adapters import check_peft
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.finetuning.classifier import encode
from braidlm.evals.finetuning.data_sets import (
    MAX_LABEL,
    DataSet,
    Files,
    all_metrics,
    constant_answer,
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
from braidlm.evals.rows import Row, files_of, json_rows, table_rows
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.evals.statistics import check_scipy


@dataclass(frozen=True)
class Examples:
    """One file's examples, in its order."""

    texts: list[tuple[str, str | None]]
    """One text, or two."""
    labels: np.ndarray
    """Classes (int64) or numbers (float64)."""

    def __len__(self) -> int:
        return len(self.texts)


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
        classes, metric = self.data_set.classes, self.data_set.metric
        return TokenizedData(train, self.train.labels, valid, self.valid.labels, classes, metric, max_length)

    def result(
        self, task: str, hyperparameters: Hyperparameters, seeds: list[int], tuned: list[FineTunedModel]
    ) -> TaskResult:
        """The result over all seeds."""
        metric, labels, classes = self.data_set.metric, self.valid.labels, self.data_set.classes
        metrics = [all_metrics(one.answers, labels, classes) for one in tuned]
        scores = [values[metric] for values in metrics]
        errors = [standard_error(metric, one.answers, labels, classes) for one in tuned]
        of_items = [error for error in errors if error is not None]
        of_seeds = float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else 0.0
        notes = {
            "method": hyperparameters.method,
            "seeds": {str(seed): score for seed, score in zip(seeds, scores, strict=True)},
            "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
            "best epochs": [one.best_epoch for one in tuned],
            "epochs": [len(one.scores) for one in tuned],
            "trained parameters": tuned[0].trained,
            "examples": len(self.train),
        }
        if classes is not None:
            notes["majority class"] = constant_answer("accuracy", labels, classes)
        return TaskResult(
            task=task,
            metric=f"{metric}, %",
            score=float(np.mean(scores)),
            count=len(labels),
            # The error of the mean over seeds, over samples of items and of seeds.
            standard_error=math.sqrt(float(np.mean(of_items)) ** 2 + of_seeds) if of_items else None,
            chance=constant_answer(metric, labels, classes),
            also={name: float(np.mean([values[name] for values in metrics])) for name in metrics[0] if name != metric},
            notes=notes,
            items={self.data_set.name: tuned[0].answers.tolist()},
        )


def read_labelled(data_set: DataSet, path: Path) -> LabelledTask:
    """A data set from its folder, or from its training file, which is beside the validation file."""
    files = _layout(data_set, path)
    folder = path.parent if path.is_file() else path
    paths = [folder / files.train, folder / files.valid]
    train, valid = (read_examples(data_set, file, files) for file in paths)
    if data_set.labels is not None and len(set(train.labels.tolist())) < 2:
        only = data_set.labels[int(train.labels[0])]
        raise BraidError(f"every example has the label '{only}': there is nothing to learn", str(paths[0]))
    digest = hashlib.sha256("".join(f"{file.name} {sha256_of(file)}\n" for file in paths).encode())
    return LabelledTask(data_set, train, valid, digest.hexdigest())


def _layout(data_set: DataSet, path: Path) -> Files:
    """The layout whose files exist, by preference the one that has the given file."""
    folder = path.parent if path.is_file() else path
    complete, partial = [], []
    for files in data_set.files:
        missing = [name for name in (files.train, files.valid) if not (folder / name).is_file()]
        complete += [] if missing else [files]
        partial += [(files, missing[0])] if len(missing) == 1 else []
    if complete:
        return next((files for files in complete if path.is_file() and files.train == path.name), complete[0])
    if not partial:
        names = [f"{files.train} and {files.valid}" for files in data_set.files]
        raise BraidError(f"there is no data of {data_set.task} here", str(folder), f"It is {', or '.join(names)}.")
    files, absent = partial[0]
    present = files.train if absent == files.valid else files.valid
    raise BraidError(
        f"{present} is here, and {absent} is not: {data_set.task} needs examples to learn from and examples to judge",
        str(folder),
        f"Put {absent} beside it, or give another folder with `--data {data_set.task}=FOLDER`.",
    )


def read_examples(data_set: DataSet, path: Path, files: Files) -> Examples:
    """The examples of one file."""
    texts, labels = [], []
    (file,) = files_of(path)
    for row in json_rows(file) if path.suffix == ".jsonl" else table_rows(file, files.columns):
        row = replace(row, fields={data_set.other_fields.get(name, name): value for name, value in row.fields.items()})
        texts.append(_texts(data_set, row))
        labels.append(_label(data_set, row))
    if not texts:
        raise BraidError("there are no examples in this file", str(path))
    return Examples(texts, np.array(labels, dtype=np.float64 if data_set.labels is None else np.int64))


def _texts(data_set: DataSet, row: Row) -> tuple[str, str | None]:
    for name in data_set.text_fields:
        if not isinstance(row.value(name), str):
            raise row.error(f"'{name}' is to be a text, not {json.dumps(row.value(name))[:40]}")
    first, *second = (template.format_map(row.fields) for template in data_set.texts)
    if not "".join((first, *second)).strip():
        raise row.error("there is no text")
    return first, second[0] if second else None


def _label(data_set: DataSet, row: Row) -> float:
    value = row.value("label")
    shown = json.dumps(value)[:40]
    if data_set.labels is None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= MAX_LABEL:
            raise row.error(
                f"the label {shown} is not a number from 0 to {MAX_LABEL:g}, as those of {data_set.name} are"
            )
        return number
    name = str(int(value)) if isinstance(value, bool) else str(value).strip()
    if isinstance(value, str) and name in data_set.labels:
        return data_set.labels.index(name)
    if name not in map(str, range(len(data_set.labels))):
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(data_set.labels))
        raise row.error(f"the label {shown} is none of those of {data_set.name}: {listed}")
    return int(name)
