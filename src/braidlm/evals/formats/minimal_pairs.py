"""Minimal pairs: of two sentences that differ in one point, is the grammatical one more probable?

The metric of the BabyLM pipeline: the sum of the log-probabilities of all tokens (`requests.py` says of which) is
larger for the good sentence; the accuracy of each set in percent; the mean over the sets. Equal sums count as right, as
in the pipeline, and are counted: they occur where both sentences have the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.files.json_rows import rows_of
from braidlm.evals.files.text_files import files_of
from braidlm.evals.formats.ranked_options import predictions_by_set
from braidlm.evals.formats.set_accuracy import percentages, set_accuracy
from braidlm.evals.formats.task_items import TaskItems
from braidlm.evals.results import Part, TaskResult
from braidlm.evals.scoring.divergence import from_divergence
from braidlm.evals.scoring.near_ties import resolve_near_ties
from braidlm.evals.scoring.prefix_trees import PrefixTrees
from braidlm.evals.scoring.requests import Begin, Request, sentence_requests
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, cached_per_tokenizer
from braidlm.evals.scoring.windows import too_long

GOOD, BAD = "sentence_good", "sentence_bad"
METRIC = "accuracy, % (mean over sets)"
KINDS = {"field": "field", "linguistics_term": "phenomenon"}
"""Attributes of BLiMP's sets: their names in its files, and ours."""
EXAMPLE = f'{{"{GOOD}": "Cats sleep.", "{BAD}": "Cats sleeps.", "UID": "agreement"}}'


@dataclass(frozen=True)
class Pair:
    """Two sentences, and the set that they belong to."""

    good: str
    bad: str
    of: str
    kinds: tuple[str, ...] = ()
    """The values of the attributes of `KINDS` that its file has."""


@dataclass
class MinimalPairs(TaskItems[Pair]):
    """All pairs of a task, read and checked."""

    def differences(
        self,
        scorer: Scorer,
        tokenizer: BraidTokenizer,
        advance: ProgressCallback | None = None,
        begin: Begin = "tokenizer",
    ) -> np.ndarray:
        """[pairs] by how many nats the good sentence is more probable."""
        requests, trees = self._prepare(scorer, tokenizer, begin)
        sums = resolve_near_ties(scorer, requests, scorer.score_trees(trees, advance).sums, _pairs_of(requests))
        return sums[0::2] - sums[1::2]

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets."""
        result = accuracy(task, self.items, self.differences(model.scorer, model.tokenizer, advance))
        requests, _ = self._prepare(model.scorer, model.tokenizer, "tokenizer")
        result.notes.update(too_long(requests, model.scorer.context, _pairs_of(requests)))
        return result

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The chosen sentences as the BabyLM pipeline writes them."""
        chosen = zip(self.items, result.items["chosen"], strict=True)
        return predictions_by_set(
            [(pair.good, pair.bad)[option] for pair, option in chosen], [pair.of for pair in self.items]
        )

    @cached_per_tokenizer
    def _prepare(self, scorer: Scorer, tokenizer: BraidTokenizer, begin: Begin) -> tuple[list[Request], PrefixTrees]:
        sentences = [sentence for pair in self.items for sentence in (pair.good, pair.bad)]
        requests = pairs_from_divergence(sentence_requests(tokenizer, sentences, begin))
        return requests, scorer.build_trees(requests)


def pairs_from_divergence(requests: Sequence[Request]) -> list[Request]:
    """Good and bad sentences in turn, scored from the first token in which the two of a pair differ."""
    return from_divergence(requests, _pairs_of(requests))


def _pairs_of(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """The indices of the two sentences of each pair."""
    return [(index, index + 1) for index in range(0, len(requests), 2)]


def accuracy(task: str, pairs: Sequence[Pair], differences: np.ndarray) -> TaskResult:
    """The result that follows from the differences."""
    right = (differences >= 0).tolist()
    result = set_accuracy(task, METRIC, [pair.of for pair in pairs], right, [0.5] * len(pairs))
    result.notes["ties"] = int(np.count_nonzero(differences == 0))
    result.items["chosen"] = [0 if hit else 1 for hit in right]
    result.by.update(_by_kind(pairs, right))
    return result


def _by_kind(pairs: Sequence[Pair], right: Sequence[bool]) -> dict[str, dict[str, Part]]:
    """The accuracy by field and by phenomenon, where every pair has both."""
    if not all(len(pair.kinds) == len(KINDS) for pair in pairs):
        return {}
    names = KINDS.values()
    return {kind: percentages([pair.kinds[at] for pair in pairs], right) for at, kind in enumerate(names)}


def read_pairs(path: Path | str) -> MinimalPairs:
    """The pairs of every `.jsonl` file of a folder, or of one file."""
    rows = rows_of(files_of(path, example=EXAMPLE), path, EXAMPLE)
    pairs = [
        Pair(row.text(GOOD), row.text(BAD), str(row.fields.get("UID") or row.stem), _kinds(row.fields)) for row in rows
    ]
    return MinimalPairs(pairs, rows.sha256)


def _kinds(fields: Mapping[str, Any]) -> tuple[str, ...]:
    # One of BLiMP's sets writes its field as syntax/semantics, the others of that field as syntax_semantics.
    return tuple(str(fields[key]).replace("/", "_") for key in KINDS if fields.get(key))
