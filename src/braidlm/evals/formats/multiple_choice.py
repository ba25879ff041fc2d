"""Multiple choice: the option that a model finds most probable is its answer.

An option's log-probability is the sum over its tokens, given what stands before. It is compared as it is (raw), by
token, and by byte; each task has one of these as its score and gives the others beside it. This is what
lm-evaluation-harness does (`acc` is raw; its `acc_norm` divides by characters, which for English are bytes) and what
Super Tiny Language Models reports. Of equal options the first is taken, as there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.formats.ranked_options import ranges
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.settling import settled
from braidlm.evals.scoring.texts import Begin, requests_for
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.influence import KEY, of_mean

Measure = Literal["raw", "per token", "per byte"]
MEASURES: tuple[Measure, ...] = ("raw", "per token", "per byte")


@dataclass(frozen=True)
class Question:
    """Options to choose from."""

    options: tuple[tuple[str, str], ...]
    """Of each: what is read first, and what is scored."""
    answer: int
    """Which one is right."""
    of: str = ""
    """The subject or language that it belongs to."""


def endings(context: str, choices: Sequence[str], answer: int, of: str = "") -> Question:
    """Options that differ in what follows one context, after a space."""
    return Question(tuple((context, f" {choice}") for choice in choices), answer, of)


def beginnings(contexts: Sequence[str], ending: str, answer: int) -> Question:
    """Options that differ in what stands before one ending: partial evaluation."""
    return Question(tuple((context, f" {ending}") for context in contexts), answer)


@dataclass
class MultipleChoice:
    """All questions of a task, read and checked."""

    questions: list[Question]
    sha256: str
    headline: Measure = "raw"
    begin: Begin = "tokenizer"
    fixed_options: bool = False
    """Whether all questions have the same options (yes and no, letters): always giving one is then the baseline."""
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.questions)

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Accuracy in percent over all questions."""
        requests, forest = self._lay(model.scorer, model.tokenizer)
        scores = model.scorer.score_forest(forest, advance)
        bytes_ = np.array([len(text.removeprefix(" ").encode()) for q in self.questions for _, text in q.options])
        lengths = {"per token": np.maximum(np.diff(scores.bounds), 1), "per byte": np.maximum(bytes_, 1)}
        groups = ranges([len(question.options) for question in self.questions])
        sums = settled(model.scorer, requests, scores.sums, groups, list(lengths.values()))
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
        answers = np.array([question.answer for question in self.questions])
        right = {name: np.array(options) == answers for name, options in chosen.items()}
        hits = right[self.headline]
        share = float(hits.mean())
        return TaskResult(
            task=task,
            metric=metric(self.headline),
            score=100 * share,
            count=self.count,
            standard_error=100 * math.sqrt(share * (1 - share) / self.count) if self.count > 1 else None,
            chance=self._most_frequent() if self.fixed_options else self._guessing(),
            parts=self._parts(hits),
            also={name: 100 * float(right[name].mean()) for name in MEASURES},
            notes=notes,
            items={"chosen": chosen[self.headline], KEY: of_mean(100.0 * hits)},
        )

    def _parts(self, hits: np.ndarray) -> dict[str, Part]:
        """The accuracy of each subject, where there are several."""
        found: dict[str, list[bool]] = {}
        for question, hit in zip(self.questions, hits, strict=True):
            found.setdefault(question.of, []).append(bool(hit))
        if len(found) < 2 and "" in found:
            return {}
        return {name: Part(100 * sum(some) / len(some), len(some)) for name, some in sorted(found.items())}

    def _guessing(self) -> float:
        """What choosing at random gets, in percent."""
        return 100 * sum(1 / len(question.options) for question in self.questions) / self.count

    def _most_frequent(self) -> float:
        """What always giving the same option would get, in percent."""
        places = np.bincount([question.answer for question in self.questions])
        return 100 * float(places.max()) / self.count

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[list[Request], Forest]:
        """Requests in rows; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share)
        if key not in self._laid:
            texts = [spaces_moved(*option) for question in self.questions for option in question.options]
            requests = requests_for(tokenizer, texts, self.begin)
            self._laid = {key: (requests, scorer.lay(requests))}
        return self._laid[key]


def spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Spaces that end a context belong to what follows, as in lm-evaluation-harness: so tokenizers write them."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def metric(measure: Measure) -> str:
    """How the score is called."""
    return "accuracy, %" if measure == "raw" else f"accuracy, % ({measure})"
