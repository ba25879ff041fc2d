"""Whole tasks on a model in memory, as `braid eval` runs them: the wall clock of each, and where the time goes.

A task's seconds are from its opened data to its result: encoding texts, building prefix trees, the model, near ties in
float64, counting. Without --model the model has random weights: the time is the same, the scores mean nothing
(and near ties are more frequent than in a trained model). --check-cpu scores the same on the CPU in float32 and counts
the items with another answer, of which there must be none.

python benchmarks/evaluate_suite.py DATA [--device cuda] [--tasks babylm_fast blimp] [--model FOLDER] [--check-cpu]
"""

import argparse
import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import record
from shapes import VOCABULARY, braid_model

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.build import load_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, Scores
from braidlm.evals.task_data import find_data
from braidlm.evals.tasks import TASKS, OpenTask
from braidlm.evals.tasks.task import expand

ENOUGH_TEXT = 20_000_000
"""Characters to train a tokenizer on."""
LISTS = ("pairs", "items", "questions", "passages")
"""The names of the lists that --items shortens."""


class TimedScorer(Scorer):
    """A scorer that records its times and scores."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.reset()

    def reset(self) -> None:
        """Delete all records."""
        self.seconds = dict.fromkeys(("laying_out", "in_model", "settling"), 0.0)
        self.tokens, self.rescored = 0, 0
        self.scores: list[Scores] = []

    def build_trees(self, requests: Sequence[Request]) -> PrefixTrees:
        with self._timed("laying_out"):
            return super().build_trees(requests)

    def score_trees(self, trees: PrefixTrees, advance: ProgressCallback | None = None, margins: bool = False) -> Scores:
        with self._timed("in_model"):
            scores = super().score_trees(trees, advance, margins)
        self.tokens += trees.nodes
        self.scores.append(scores)
        return scores

    def score_float64(self, requests: Sequence[Request], margins: bool = False) -> Scores:
        self.rescored += len(requests)
        with self._timed("settling"):
            return super().score_float64(requests, margins)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            wait(self.device)
            self.seconds[what] += time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def data_paths(names: Sequence[str], data: Path) -> dict[str, Path]:
    """The data of each task; tasks without data are skipped with a message."""
    paths: dict[str, Path] = {}
    for name in names:
        try:
            paths |= find_data([name], data, {})
        except BraidError as error:
            print(f"left out: {str(error).splitlines()[0]}")
    return paths


def opened(name: str, path: Path, max_items: int | None) -> OpenTask:
    """A task with its data, or with evenly spaced items of it."""
    task: Any = TASKS[name]().open(path)
    for field in LISTS:
        items = getattr(task, field, None)
        if max_items is not None and isinstance(items, list) and len(items) > max_items:
            return dataclasses.replace(task, **{field: items[:: len(items) // max_items][:max_items]})
    return task


def texts_in(value: Any) -> Iterator[str]:
    """All texts of the data."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def tokenizer_for(tasks: Sequence[OpenTask]) -> BraidTokenizer:
    """One that is trained on the tasks' own texts."""
    texts, size = [], 0
    for task in tasks:
        for text in texts_in(task):
            texts.append(text)
            size += len(text)
            if size > ENOUGH_TEXT:
                break
    return BraidTokenizer(train_bpe(texts, VOCABULARY), SpecialTokens())


def loaded(args: argparse.Namespace, tasks: Callable[[], list[OpenTask]]) -> tuple[Any, BraidTokenizer]:
    """The model, and a tokenizer that fits it."""
    if args.model is not None:
        return load_model(args.model, args.device), load_tokenizer(args.model)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else tokenizer_for(tasks())
    torch.manual_seed(0)
    return braid_model(args.family, args.size, args.context).to(args.device), tokenizer


def measured(name: str, task: OpenTask, model: EvaluatedModel) -> tuple[dict[str, Any], TaskResult, list[Scores]]:
    """One task, from its opened data to its result."""
    scorer = model.scorer
    assert isinstance(scorer, TimedScorer)
    scorer.reset()
    wait(scorer.device)
    start = time.perf_counter()
    result = task.evaluate(name, model)
    wait(scorer.device)
    seconds = time.perf_counter() - start
    row = {
        "task": name,
        "items": task.count,
        "score": result.score,
        "tokens": scorer.tokens,
        "settled": scorer.rescored,
        "seconds": seconds,
        **scorer.seconds,
        "texts_and_counting": seconds - sum(scorer.seconds.values()),
    }
    return row, result, scorer.scores


def compare(
    result: TaskResult, scores: list[Scores], expected: TaskResult, expected_scores: list[Scores]
) -> dict[str, Any]:
    """Two results on one task: items with another answer, and the largest difference of scores."""
    answers = [
        zip(values, expected.items[key], strict=True)
        for key, values in result.items.items()
        if values and all(isinstance(value, (bool, int, str)) for value in values)
    ]
    differences = [np.abs(one.tokens - other.tokens).max() for one, other in zip(scores, expected_scores, strict=True)]
    return {
        "items_answered_otherwise": sum(one != other for pairs in answers for one, other in pairs),
        "largest_difference": float(max(differences)),
        "difference_of_score": abs(result.score - expected.score),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the data folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", default=["babylm_fast", "blimp"], help="tasks and suites")
    parser.add_argument("--model", type=Path, help="a model folder (random weights)")
    parser.add_argument("--family", default="gpt2", help="of random weights: gpt2, llama, moep")
    parser.add_argument("--size", default="28m")
    parser.add_argument("--context", type=int, default=512, help="of random weights")
    parser.add_argument("--tokenizer", type=Path, help="for random weights (one is trained on the tasks' texts)")
    parser.add_argument("--items", type=int, help="at most so many of each task, where it can be shortened (all)")
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many, each on newly opened data")
    parser.add_argument("--check-cpu", action="store_true", help="score on the CPU too, in float32, and compare")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    paths = data_paths(expand(args.tasks), args.data)
    if not paths:
        parser.error("there is no data for any of these tasks")

    def tasks() -> list[OpenTask]:
        return [opened(name, path, args.items) for name, path in paths.items()]

    model, tokenizer = loaded(args, tasks)
    evaluated = EvaluatedModel(TimedScorer(model), tokenizer)
    evaluated.scorer.score([Request(range(2, 2 + length)) for length in range(2, 60)])  # warmup
    on_cpu = EvaluatedModel(TimedScorer(copy.deepcopy(model).cpu()), tokenizer) if args.check_cpu else None
    rows = []
    for name, path in paths.items():
        rounds = [measured(name, opened(name, path, args.items), evaluated) for _ in range(args.rounds)]
        row, result, scores = min(rounds, key=lambda each: each[0]["seconds"])
        if on_cpu is not None:
            _, expected, expected_scores = measured(name, opened(name, path, args.items), on_cpu)
            row |= compare(result, scores, expected, expected_scores)
        rows.append(row)
        print(f"{name}: {row['score']:.2f} in {row['seconds']:.2f} s", flush=True)
    counted = [key for key, value in rows[0].items() if isinstance(value, (int, float)) and "difference" not in key]
    whole = dict.fromkeys(rows[0], "") | {key: sum(row[key] for row in rows) for key in counted if key != "score"}
    record("evaluate_suite", torch.device(args.device), [*rows, {**whole, "task": "in all"}], args.out)


if __name__ == "__main__":
    main()
