"""Made-up words: does a model inflect them as people do?

For each word there are sentences with its possible forms, and the share of people who chose the first. The metric of
the BabyLM pipeline: the probability of the first sentence among the sentences of its word (the softmax of their summed
log-probabilities), and Spearman's correlation of that with the share, times 100. The pipeline computes probabilities in
float32, where all above 1 - 6e-8 are 1 and so equal in rank; they are rounded to float32 here too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.files.json_rows import rows_of
from braidlm.evals.files.text_files import files_of
from braidlm.evals.formats.ranked_options import predictions_by_set
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.divergence import from_divergence
from braidlm.evals.scoring.near_ties import NEAR_TIE, rescored
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, consecutive_ranges, sentence_requests
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.from_scipy import check_scipy, spearman
from braidlm.evals.statistics.standard_errors import spearman_error

EXAMPLE = r'{"sentences": "... blicked.\t... blought.", "ratio": 0.8}'


@dataclass(frozen=True)
class Forms:
    """Sentences with the forms of one word, and the share of people who chose the first."""

    sentences: tuple[str, ...]
    ratio: float


@dataclass
class MadeUpWords(TaskItems[Forms]):
    """All words of a task, read and checked."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Spearman's correlation times 100."""
        sums, groups = self._sums(model.scorer, model.tokenizer, advance)
        probabilities = np.array([probability_of_first(sums[group.start : group.stop]) for group in groups])
        correlation = spearman(probabilities, np.array([word.ratio for word in self.items]))
        error = spearman_error(correlation, self.count)
        return TaskResult(
            task=task,
            metric="Spearman's correlation with people, x 100",
            score=100 * correlation,
            count=self.count,
            standard_error=None if error is None else 100 * error,
            chance=0.0,
            notes=dict(too_long(self._prepare(model.scorer, model.tokenizer)[0], model.scorer.context, groups)),
            items={
                "chosen": [int(np.argmax(sums[group.start : group.stop])) for group in groups],
                "probability": probabilities.tolist(),
            },
        )

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The chosen sentences and the probabilities as the BabyLM pipeline writes them."""
        items = zip(self.items, result.items["chosen"], result.items["probability"], strict=True)
        answers = [{"pred": word.sentences[chosen], "prob": chance} for word, chosen, chance in items]
        return predictions_by_set(answers, [result.task] * self.count)

    def _sums(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: ProgressCallback | None
    ) -> tuple[np.ndarray, list[range]]:
        """Of every sentence; recomputed in float64 for words whose rank depends on a near tie."""
        requests, trees, groups = self._prepare(scorer, tokenizer)
        sums = scorer.score_trees(trees, advance).sums
        return rescored(scorer, requests, sums, groups, near_ranks(sums, groups)), groups

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[list[Request], PrefixTrees, list[range]]:
        groups = consecutive_ranges([len(word.sentences) for word in self.items])
        sentences = [sentence for word in self.items for sentence in word.sentences]
        requests = from_divergence(sentence_requests(tokenizer, sentences), groups)
        return requests, scorer.build_trees(requests), groups


def log_odds(sums: np.ndarray) -> float:
    """The log-odds of the first, which rank as its probability does."""
    return float(sums[0] - np.logaddexp.reduce(sums[1:]))


def probability_of_first(sums: np.ndarray) -> float:
    """The softmax's first value, rounded to float32."""
    return float(np.float32(np.exp(-np.logaddexp(0.0, -log_odds(sums)))))


def near_ranks(sums: np.ndarray, groups: list[range]) -> list[int]:
    """The words whose log-odds are so near another's that rounding could change their order."""
    values = np.array([log_odds(sums[group.start : group.stop]) for group in groups])
    # Equal log-odds belong to equal sentences: they stay equal, and are recomputed together.
    distinct, indices = np.unique(values, return_inverse=True)
    near = np.flatnonzero(np.diff(distinct) < NEAR_TIE)
    return np.flatnonzero(np.isin(indices, np.concatenate((near, near + 1)))).tolist()


def read_forms(path: Path | str) -> MadeUpWords:
    """The words of every `.jsonl` file of a folder, or of one file."""
    check_scipy()
    rows = rows_of(files_of(path, example=EXAMPLE), path, EXAMPLE)
    words = []
    for row in rows:
        sentences = tuple(row.text("sentences").split("\t"))
        if len(sentences) < 2 or not all(sentence.strip() for sentence in sentences):
            raise row.error("'sentences' is to hold two sentences or more, separated by tabs")
        ratio = row.number("ratio")
        if not 0 <= ratio <= 1:
            raise row.error(f"'ratio' is to be a share between 0 and 1, not {ratio:g}")
        words.append(Forms(sentences, ratio))
    return MadeUpWords(words, rows.sha256)
