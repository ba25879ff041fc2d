"""Minimal pairs: of two sentences that differ in one point, is the grammatical one more probable?

The metric of the BabyLM pipeline: the sum of the log-probabilities of all tokens (`texts.py` says of which) is larger
for the good sentence; the accuracy of each set in percent; the mean over the sets. Equal sums count as right there, so
they do here, and are counted: it happens when a tokenizer writes both sentences with the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.files.json_rows import files_of, rows_of
from braidlm.evals.formats.ranked_options import listed
from braidlm.evals.formats.set_accuracy import set_accuracy
from braidlm.evals.reports.results import Part, TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.forest import Forest, Request
from braidlm.evals.scoring.parting import parted
from braidlm.evals.scoring.scorer import Advance, Scorer
from braidlm.evals.scoring.settling import settled
from braidlm.evals.scoring.texts import Begin, sentence_requests
from braidlm.evals.scoring.windows import too_long

GOOD, BAD = "sentence_good", "sentence_bad"
METRIC = "accuracy, % (mean over sets)"
KINDS = {"field": "field", "linguistics_term": "phenomenon"}
"""By what BLiMP sorts its sets, as its files call it and as we do."""
EXAMPLE = f'{{"{GOOD}": "Cats sleep.", "{BAD}": "Cats sleeps.", "UID": "agreement"}}'


@dataclass(frozen=True)
class Pair:
    """Two sentences, and the set that they belong to."""

    good: str
    bad: str
    of: str
    kinds: tuple[str, ...] = ()
    """What BLiMP's files say of it beside its set: those of `KINDS` that they have."""


@dataclass
class MinimalPairs:
    """All pairs of a task, read and checked."""

    pairs: list[Pair]
    sha256: str
    _laid: dict[tuple, tuple] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.pairs)

    def differences(
        self, scorer: Scorer, tokenizer: BraidTokenizer, advance: Advance | None = None, begin: Begin = "tokenizer"
    ) -> np.ndarray:
        """[pairs] by how many nats the good sentence is more probable."""
        requests, forest = self._lay(scorer, tokenizer, begin)
        sums = settled(scorer, requests, scorer.score_forest(forest, advance).sums, _pairs_of(requests))
        return sums[0::2] - sums[1::2]

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """Accuracy in percent, the mean over sets."""
        result = accuracy(task, self.pairs, self.differences(model.scorer, model.tokenizer, advance))
        requests, _ = self._lay(model.scorer, model.tokenizer, "tokenizer")
        result.notes.update(too_long(requests, model.scorer.context, _pairs_of(requests)))
        return result

    def predictions(self, result: TaskResult) -> dict[str, Any]:
        """The chosen sentences as the BabyLM pipeline writes them."""
        chosen = zip(self.pairs, result.items["chosen"], strict=True)
        return listed([(pair.good, pair.bad)[option] for pair, option in chosen], [pair.of for pair in self.pairs])

    def _lay(self, scorer: Scorer, tokenizer: BraidTokenizer, begin: Begin) -> tuple[list[Request], Forest]:
        """Requests in rows; kept, because the checkpoints of a run have one tokenizer."""
        key = (tokenizer.fingerprint, scorer.context, scorer.share, begin)
        if key not in self._laid:
            sentences = [sentence for pair in self.pairs for sentence in (pair.good, pair.bad)]
            requests = where_they_part(sentence_requests(tokenizer, sentences, begin))
            self._laid = {key: (requests, scorer.lay(requests))}
        return self._laid[key]


def where_they_part(requests: Sequence[Request]) -> list[Request]:
    """Good and bad sentences in turn, scored from the first token in which the two of a pair differ."""
    return parted(requests, _pairs_of(requests))


def _pairs_of(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Where the two of each pair stand."""
    return [(at, at + 1) for at in range(0, len(requests), 2)]


def accuracy(task: str, pairs: Sequence[Pair], differences: np.ndarray) -> TaskResult:
    """What differences mean."""
    right = (differences >= 0).tolist()
    result = set_accuracy(task, METRIC, [pair.of for pair in pairs], right, [0.5] * len(pairs))
    result.notes["ties"] = int(np.count_nonzero(differences == 0))
    result.items["chosen"] = [0 if hit else 1 for hit in right]
    result.by.update(_by_kind(pairs, right))
    return result


def _by_kind(pairs: Sequence[Pair], right: Sequence[bool]) -> dict[str, dict[str, Part]]:
    """The share of pairs that is right by field and by phenomenon, where every pair says of which it is."""
    if not all(len(pair.kinds) == len(KINDS) for pair in pairs):
        return {}
    found: dict[str, dict[str, Part]] = {}
    for at, kind in enumerate(KINDS.values()):
        hits: dict[str, list[bool]] = {}
        for pair, hit in zip(pairs, right, strict=True):
            hits.setdefault(pair.kinds[at], []).append(hit)
        found[kind] = {name: Part(100 * sum(some) / len(some), len(some)) for name, some in sorted(hits.items())}
    return found


def read_pairs(folder: Path | str) -> MinimalPairs:
    """The pairs of every `.jsonl` file of a folder, or of one file."""
    rows = rows_of(files_of(folder, example=EXAMPLE), folder, EXAMPLE)
    pairs = [
        Pair(row.text(GOOD), row.text(BAD), str(row.facts.get("UID") or row.stem), _kinds(row.facts)) for row in rows
    ]
    return MinimalPairs(pairs, rows.sha256)


def _kinds(facts: Mapping[str, Any]) -> tuple[str, ...]:
    # One of BLiMP's sets writes its field as syntax/semantics, the others of that field as syntax_semantics.
    return tuple(str(facts[key]).replace("/", "_") for key in KINDS if facts.get(key))
