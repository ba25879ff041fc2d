"""Multiple choice: the most probable option is the model's answer.

An option's log-probability is the sum over its tokens, given its context. It is compared as it is (raw), per token,
and per byte; each task has one of these as its score and gives the others beside it. This is what
lm-evaluation-harness does (`acc` is raw; its `acc_norm` divides by characters, which for English are bytes) and what
Super Tiny Language Models reports. Of equal options the first is taken, as there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import TaskItems, accuracy, percentages
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.near_ties import is_greedy, resolve_near_ties
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Begin, Request, consecutive_ranges, requests_for, too_long
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer

Measure = Literal["raw", "per token", "per byte"]
MEASURES: tuple[Measure, ...] = ("raw", "per token", "per byte")


@dataclass(frozen=True)
class Question:
    """Options to choose from."""

    options: tuple[tuple[str, str], ...]
    """The context of each option, and the continuation that is scored."""
    answer: int
    """The index of the right option."""
    of: str = ""
    """The subject or language that it belongs to."""


def endings(context: str, choices: Sequence[str], answer: int, of: str = "") -> Question:
    """Options that are continuations of one context, after a space."""
    return Question(tuple((context, f" {choice}") for choice in choices), answer, of)


def beginnings(contexts: Sequence[str], ending: str, answer: int) -> Question:
    """Options that are contexts of one ending: partial evaluation."""
    return Question(tuple((context, f" {ending}") for context in contexts), answer)


@dataclass
class MultipleChoice(TaskItems[Question]):
    """All questions of a task, read and checked."""

    headline: Measure = "raw"
    begin: Begin = "tokenizer"
    fixed_options: bool = False
    """Whether all questions have the same options (yes and no, letters): always giving one is then the baseline."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent over all questions."""
        requests, trees = self._prepare(model.scorer, model.tokenizer, model.settings.pauses)
        scores = model.scorer.score_trees(trees, advance)
        bytes_ = np.array([len(text.removeprefix(" ").encode()) for q in self.items for _, text in q.options])
        lengths = {"per token": np.maximum(np.diff(scores.bounds), 1), "per byte": np.maximum(bytes_, 1)}
        groups = consecutive_ranges([len(question.options) for question in self.items])
        sums = resolve_near_ties(model.scorer, requests, scores.sums, groups, list(lengths.values()))
        values = {"raw": sums, **{name: sums / length for name, length in lengths.items()}}
        chosen = {
            name: [int(np.argmax(values[name][group.start : group.stop])) for group in groups] for name in MEASURES
        }
        notes = {
            "ties": sum(bool(len(g) > 1 and np.ptp(np.sort(sums[list(g)])[-2:]) == 0) for g in groups),
            **too_long(requests, model.scorer.context, groups),
        }
        return self._result(task, chosen, notes)

    def _result(self, task: str, chosen: dict[Measure, list[int]], notes: dict[str, Any]) -> TaskResult:
        answers = np.array([question.answer for question in self.items])
        right = {name: np.array(options) == answers for name, options in chosen.items()}
        parts = percentages([question.of for question in self.items], right[self.headline])
        return accuracy(
            task,
            right[self.headline],
            metric(self.headline),
            chance=self._chance(answers),
            parts={} if list(parts) == [""] else parts,
            also={name: 100 * float(right[name].mean()) for name in MEASURES},
            notes=notes,
            items={"chosen": chosen[self.headline]},
        )

    def _chance(self, answers: np.ndarray) -> float:
        """The score of always choosing the most frequent answer where options are fixed, else of random guesses."""
        if self.fixed_options:
            return 100 * float(np.bincount(answers).max()) / self.count
        return 100 * sum(1 / len(question.options) for question in self.items) / self.count

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, pauses: int) -> tuple[list[Request], PrefixTrees]:
        texts = [spaces_moved(*option) for question in self.items for option in question.options]
        requests = requests_for(tokenizer, texts, self.begin, pauses)
        return requests, scorer.build_trees(requests)


def spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Trailing spaces of a context become part of the continuation, as tokenizers encode them (and as in
    lm-evaluation-harness)."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def metric(measure: Measure) -> str:
    """The name of the score."""
    return "accuracy, %" if measure == "raw" else f"accuracy, % ({measure})"


@dataclass
class LastWords(TaskItems[tuple[str, str]]):
    """The passages of a task, as context and last word with its space: would a model generate the word?

    The metric of lm-evaluation-harness for LAMBADA: right if every token of the word, given all before it, is the most
    probable one; the perplexity is that of words, not of tokens.
    """

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, and the perplexity of the words."""
        requests, trees = self._prepare(model.scorer, model.tokenizer, model.settings.pauses)
        scores = model.scorer.score_trees(trees, advance, margins=True)
        right = is_greedy(model.scorer, requests, scores)
        perplexity = math.exp(-float(np.mean(scores.sums)))
        return accuracy(
            task,
            right,
            also={"perplexity of the word": perplexity},
            notes=too_long(requests, model.scorer.context),
            items={"right": right.tolist()},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, pauses: int) -> tuple[list[Request], PrefixTrees]:
        requests = requests_for(tokenizer, [spaces_moved(*passage) for passage in self.items], pauses=pauses)
        return requests, scorer.build_trees(requests)
