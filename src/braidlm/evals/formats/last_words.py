"""Last words: would a model generate the word that a passage ends with, and how probable is it?

The metric of lm-evaluation-harness for LAMBADA: right if every token of the word, given all before it, is the most
probable one; the perplexity is that of words, not of tokens.
"""

import math
from dataclasses import dataclass

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.multiple_choice import spaces_moved
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.near_ties import is_greedy
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Request, requests_for
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.influence import INFLUENCE, mean_influences
from braidlm.evals.statistics.standard_errors import percentage_error


@dataclass
class LastWords(TaskItems[tuple[str, str]]):
    """The passages of a task: of each the context, and the last word with its space."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, and the perplexity of the words."""
        requests, trees = self._prepare(model.scorer, model.tokenizer, model.settings.pauses)
        scores = model.scorer.score_trees(trees, advance, margins=True)
        right = is_greedy(model.scorer, requests, scores)
        rate = float(right.mean())
        return TaskResult(
            task=task,
            metric="accuracy, %",
            score=100 * rate,
            count=self.count,
            standard_error=percentage_error(rate, self.count),
            also={"perplexity of the word": math.exp(-float(np.mean(scores.sums)))},
            notes=dict(too_long(requests, model.scorer.context)),
            items={"right": right.tolist(), INFLUENCE: mean_influences(100.0 * right)},
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, pauses: int) -> tuple[list[Request], PrefixTrees]:
        requests = requests_for(tokenizer, [spaces_moved(*passage) for passage in self.items], pauses=pauses)
        return requests, scorer.build_trees(requests)
