"""Made-up words: does a model inflect them as people do?

For each word there are sentences with its possible forms, and the share of people who chose the first. The metric of
the BabyLM pipeline: the probability of the first sentence among the sentences of its word (the softmax of their summed
log-probabilities), and Spearman's correlation of that with the share, times 100. The pipeline computes probabilities in
float32, where all above 1 - 6e-8 are 1 and so equal in rank; they are rounded to it here too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.files.json_rows import files_of, rows_of
from braidlm.evals.formats.ranked_options import listed, ranges
from braidlm.evals.reports.results import TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.parting import parted
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.settling import CLOSE
from braidlm.evals.scoring.texts import sentence_requests
from braidlm.evals.scoring.windows import too_long
from braidlm.evals.statistics.correlations import spearman, spearman_error

EXAMPLE = r'{"sentences": "... blicked.\t... blought.", "ratio": 0.8}'


@dataclass(frozen=True)
class Forms:
    """Sentences with the forms of one word, and the share of people who chose the first."""

    sentences: tuple[str, ...]
    ratio: float


@dataclass
class MadeUpWords:
    """All words of a task, read and checked."""

    words: list[Forms]
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.words)

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Spearman's correlation times 100."""
        sums, groups = self._sums(model.scorer, model.tokenizer, advance)
        probabilities = np.array([probability_of_first(sums[group.start : group.stop]) for group in groups])
        correlation = spearman(probabilities, np.array([word.ratio for word in self.words]))
        error = spearman_error(correlation, self.count)
        return TaskResult(
            task=task,
            metric="Spearman's correlation with people, x 100",
            score=100 * correlation,
            count=self.count,
            standard_error=None if error is None else 100 * error,
            chance=0.0,
            notes=dict(too_long(self._lay(model.scorer, model.tokenizer)[0], model.scorer.context, groups)),
            items={
                "chosen": [int(np.argmax(sums[group.start : group.stop])) for group in groups],
                "probability": probabilities.tolist(),
            },
        )

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The chosen sentences and the probabilities as the BabyLM pipeline writes them."""
        items = zip(self.words, result.items["chosen"], result.items["probability"], strict=True)
        answers = [{"pred": word.sentences[chosen], "prob": chance} for word, chosen, chance in items]
        return listed(answers, [result.task] * self.count)

    def _sums(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: Advance | None
    ) -> tuple[np.ndarray, list[range]]:
        """Of every sentence, exact for words whose place in the ranking hangs on less than float32 can tell."""
        requests, forest, groups = self._lay(scorer, tokenizer)
        sums = scorer.score_forest(forest, advance).sums
        if scorer.settles:
            unsure = [index for at in unsure_ranks(sums, groups) for index in groups[at]]
            if unsure:
                sums[unsure] = scorer.exact([requests[index] for index in unsure]).sums
        return sums, groups

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer) -> tuple[list[Request], Forest, list[range]]:
        """Requests in rows; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share)
        if key not in self._laid:
            groups = ranges([len(word.sentences) for word in self.words])
            sentences = [sentence for word in self.words for sentence in word.sentences]
            requests = parted(sentence_requests(tokenizer, sentences), groups)
            self._laid = {key: (requests, scorer.lay(requests), groups)}
        return self._laid[key]


def odds(sums: np.ndarray) -> float:
    """The logarithm of the odds of the first among these; its order is that of the probability."""
    return float(sums[0] - np.logaddexp.reduce(sums[1:]))


def probability_of_first(sums: np.ndarray) -> float:
    """The softmax's first value, rounded to float32."""
    return float(np.float32(np.exp(-np.logaddexp(0.0, -odds(sums)))))


def unsure_ranks(sums: np.ndarray, groups: list[range]) -> list[int]:
    """The words whose odds are so near another's that rounding could turn their order."""
    values = np.array([odds(sums[group.start : group.stop]) for group in groups])
    # Equal odds are those of equal sentences: they stay equal, and are unsure together.
    distinct, which = np.unique(values, return_inverse=True)
    near = np.flatnonzero(np.diff(distinct) < CLOSE)
    return np.flatnonzero(np.isin(which, np.concatenate((near, near + 1)))).tolist()


def read_forms(place: Path | str) -> MadeUpWords:
    """The words of every `.jsonl` file of a folder, or of one file."""
    rows = rows_of(files_of(place, example=EXAMPLE), place, EXAMPLE)
    words = []
    for row in rows:
        sentences = tuple(row.text("sentences").split("\t"))
        if len(sentences) < 2 or not all(sentence.strip() for sentence in sentences):
            raise row.wrong("'sentences' is to hold two sentences or more, parted by tabs")
        ratio = row.number("ratio")
        if not 0 <= ratio <= 1:
            raise row.wrong(f"'ratio' is to be a share between 0 and 1, not {ratio:g}")
        words.append(Forms(sentences, ratio))
    return MadeUpWords(words, rows.sha256)
