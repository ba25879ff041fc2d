"""Items of several options, of which the first is right: is it the most probable one?

The metric of the BabyLM pipeline for EWoK, entity tracking and COMPS: of each option the sum of the log-probabilities
of the tokens that reach into its continuation, given its context; right if none is larger than that of the first. Equal
sums count as right, as in the pipeline, and are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.set_accuracy import set_accuracy
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.divergence import from_divergence, truncate_alike
from braidlm.evals.scoring.near_ties import resolve_near_ties
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, consecutive_ranges, requests_for
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import too_long


@dataclass(frozen=True)
class Item:
    """Options as (context, continuation), the right one first, and the set that the item belongs to."""

    options: tuple[tuple[str, str], ...]
    of: str
    answers: tuple[str, ...]
    """The options as a file of predictions has them."""


@dataclass
class RankedOptions(TaskItems[Item]):
    """All items of a task, read and checked."""

    metric: str = "accuracy, % (mean over sets)"
    splits: dict[str, str] = field(default_factory=dict)
    """For each set the split it belongs to, if there are splits."""

    def sums(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: ProgressCallback | None = None
    ) -> tuple[np.ndarray, list[range]]:
        """The log-probability of every option from where the options of an item diverge, and the range of each item."""
        requests, trees, groups, _ = self._prepare(scorer, tokenizer)
        return resolve_near_ties(scorer, requests, scorer.score_trees(trees, advance).sums, groups), groups

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets (and splits)."""
        sums, groups = self.sums(model.scorer, model.tokenizer, advance)
        chosen = [int(np.argmax(sums[group.start : group.stop])) for group in groups]  # the first of equal ones
        ties = sum(int(np.count_nonzero(sums[group.start : group.stop] == sums[group.start]) > 1) for group in groups)
        result = set_accuracy(
            task,
            self.metric,
            [item.of for item in self.items],
            [option == 0 for option in chosen],
            [1 / len(item.options) for item in self.items],
            self.splits,
        )
        result.notes.update(ties=ties, **self._prepare(model.scorer, model.tokenizer)[-1])
        result.items["chosen"] = chosen
        return result

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The answers as the BabyLM pipeline writes them: by set, in the order of the data."""
        answers = [item.answers[chosen] for item, chosen in zip(self.items, result.items["chosen"], strict=True)]
        return predictions_by_set(answers, [item.of for item in self.items])

    @cached_per_tokenizer
    def _prepare(
        self, scorer: Scorer, tokenizer: BraidTokenizer
    ) -> tuple[list[Request], PrefixTrees, list[range], dict[str, int]]:
        groups = consecutive_ranges([len(item.options) for item in self.items])
        options = [option for item in self.items for option in item.options]
        full = from_divergence(requests_for(tokenizer, options), groups)
        requests = truncate_alike(full, groups, scorer.context)
        return requests, scorer.build_trees(requests), groups, too_long(full, scorer.context, groups)


def predictions_by_set(answers: Sequence[Any], sets: Sequence[str]) -> dict[str, Any]:
    """Answers by set, each with its id, as in the BabyLM pipeline's files of predictions."""
    by_set: dict[str, Any] = {}
    for answer, name in zip(answers, sets, strict=True):
        predictions = by_set.setdefault(name, {"predictions": []})["predictions"]
        fields = answer if isinstance(answer, dict) else {"pred": answer}
        predictions.append({"id": f"{name}_{len(predictions)}", **fields})
    return by_set
