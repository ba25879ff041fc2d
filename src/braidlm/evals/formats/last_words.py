"""Last words: does a model write the word that a passage ends with, and how probable is it?

The metric of lm-evaluation-harness for LAMBADA: right if every token of the word, given all before it, is the most
probable one; the perplexity is that of words, not of tokens.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.formats.multiple_choice import spaces_moved
from braidlm.evals.reports.results import TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.settling import most_probable
from braidlm.evals.scoring.texts import requests_for
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.influence import KEY, of_mean


@dataclass
class LastWords:
    """All passages of a task, read and checked."""

    passages: list[tuple[str, str]]
    """What is read, and the last word with its space."""
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.passages)

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Accuracy in percent, and the perplexity of the words."""
        requests, forest = self._lay(model.scorer, model.tokenizer)
        scores = model.scorer.score_forest(forest, advance, leads=True)
        right = most_probable(model.scorer, requests, scores)
        share = float(right.mean())
        return TaskResult(
            task=task,
            metric="accuracy, %",
            score=100 * share,
            count=self.count,
            standard_error=100 * math.sqrt(share * (1 - share) / self.count) if self.count > 1 else None,
            also={"perplexity of the word": math.exp(-float(np.mean(scores.sums)))},
            notes=dict(too_long(requests, model.scorer.context)),
            items={"right": right.tolist(), KEY: of_mean(100.0 * right)},
        )

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[list[Request], Forest]:
        """Requests in rows; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share)
        if key not in self._laid:
            requests = requests_for(tokenizer, [spaces_moved(*passage) for passage in self.passages])
            self._laid = {key: (requests, scorer.lay(requests))}
        return self._laid[key]
