"""Multiple choice: the most probable option is the model's answer.

An option's log-probability is the sum over its tokens, given its context. It is compared as it is (raw), per token,
and per byte; each task has one of these as its score and gives the others beside it. This is what
lm-evaluation-harness does (`acc` is raw; its `acc_norm` divides by characters, which for English are bytes) and what
Super Tiny Language Models reports. Of equal options the first is taken, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.set_accuracy import percentages
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.near_ties import resolve_near_ties
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Begin, Request, consecutive_ranges, requests_for
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.influence import INFLUENCE, mean_influences
from braidlm.evals.statistics.standard_errors import percentage_error

Measure = Literal["raw", "per token", "per byte"]
MEASURES: tuple[Measure, ...] = ("raw", "per token", "per byte")


@dataclass(frozen=True)
class Question:
    """Options to choose from."""

    options: tuple[tuple[str, str], ...]
    """Of each: the context, and the continuation that is scored."""
    answer: int
    """Which one is right."""
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
        hits = right[self.headline]
        rate = float(hits.mean())
        return TaskResult(
            task=task,
            metric=metric(self.headline),
            score=100 * rate,
            count=self.count,
            standard_error=percentage_error(rate, self.count),
            chance=self._most_frequent() if self.fixed_options else self._guessing(),
            parts=self._parts(hits),
            also={name: 100 * float(right[name].mean()) for name in MEASURES},
            notes=notes,
            items={"chosen": chosen[self.headline], INFLUENCE: mean_influences(100.0 * hits)},
        )

    def _parts(self, hits: np.ndarray) -> dict[str, Part]:
        """The accuracy of each subject, where there are several."""
        parts = percentages([question.of for question in self.items], hits)
        return {} if list(parts) == [""] else parts

    def _guessing(self) -> float:
        """The score of random guesses, in percent."""
        return 100 * sum(1 / len(question.options) for question in self.items) / self.count

    def _most_frequent(self) -> float:
        """The score of always choosing the most frequent answer, in percent."""
        counts = np.bincount([question.answer for question in self.items])
        return 100 * float(counts.max()) / self.count

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
