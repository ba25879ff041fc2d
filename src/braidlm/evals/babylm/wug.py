"""Made-up words: does a model inflect them as people do?

For each word there are sentences with its possible forms, and the share of people who chose the first. The metric of
the BabyLM pipeline: the probability of the first sentence among the sentences of its word (the softmax of their summed
log-probabilities), and Spearman's correlation of that with the share, times 100. The pipeline computes probabilities in
float32, where all above 1 - 6e-8 are 1 and so equal in rank; they are rounded to float32 here too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import Item, RankedOptions, predictions_by_set
from braidlm.evals.results import TaskResult
from braidlm.evals.rows import read_rows
from braidlm.evals.scoring.scorer import NEAR_TIE, ProgressCallback, rescored
from braidlm.evals.statistics import check_scipy, spearman, spearman_error

EXAMPLE = r'{"sentences": "... blicked.\t... blought.", "ratio": 0.8}'


@dataclass
class MadeUpWords(RankedOptions):
    """All words of a task, read and checked: an item has the sentences with the forms of one word."""

    share_context: bool = False
    ratios: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[words] the share of people who chose the first sentence."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Spearman's correlation times 100; in float64 for words whose rank depends on a near tie."""
        requests, trees, groups, notes = self._prepare(model.scorer, model.tokenizer, "tokenizer")
        sums = model.scorer.score_trees(trees, advance).sums
        sums = rescored(model.scorer, requests, sums, groups, near_ranks(sums, groups))
        probabilities = np.array([probability_of_first(sums[group.start : group.stop]) for group in groups])
        correlation = spearman(probabilities, self.ratios)
        error = spearman_error(correlation, self.count)
        error = None if error is None else 100 * error
        chosen = [int(np.argmax(sums[group.start : group.stop])) for group in groups]
        items = {"chosen": chosen, "probability": probabilities.tolist()}
        metric = "Spearman's correlation with people, x 100"
        return TaskResult(task, metric, 100 * correlation, self.count, error, chance=0.0, notes=notes, items=items)

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The chosen sentences and the probabilities as the BabyLM pipeline writes them."""
        items = zip(self.items, result.items["chosen"], result.items["probability"], strict=True)
        answers = [{"pred": word.texts[chosen], "prob": chance} for word, chosen, chance in items]
        return predictions_by_set(answers, [result.task] * self.count)


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
    rows = read_rows(path, EXAMPLE)
    words, ratios = [], []
    for row in rows:
        sentences = tuple(row.text("sentences").split("\t"))
        if len(sentences) < 2 or not all(sentence.strip() for sentence in sentences):
            raise row.error("'sentences' is to hold two sentences or more, separated by tabs")
        ratio = row.number("ratio")
        if not 0 <= ratio <= 1:
            raise row.error(f"'ratio' is to be a share between 0 and 1, not {ratio:g}")
        words.append(Item(tuple(("", sentence) for sentence in sentences), row.stem, sentences))
        ratios.append(ratio)
    return MadeUpWords(words, rows.sha256, ratios=np.array(ratios))
